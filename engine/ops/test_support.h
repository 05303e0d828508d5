// For the operators' tests: tensors that own their memory, filled from double-precision values.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "engine/core/tensor.h"

namespace mbridge::test {

using Values = std::vector<double>;

// Whether operators run on a device (engine/ops/reference). Then F32 storage of narrow types, which only the CPU knows, and
// narrow storage go to different twins, whose bits are not compared.
inline bool g_on_device = false;

inline double RoundTo(DType precision, double x) {
  const auto f = static_cast<float>(x);
  if (precision == DType::kBF16) return ToFloat(ToBFloat16(f));
  if (precision == DType::kF16) return ToFloat(ToFloat16(f));
  return precision == DType::kF32 ? f : x;
}

// Uniform in (-scale, scale), rounded to `precision`.
inline Values RandomValues(int64_t count, uint32_t seed, double scale = 1.0, DType precision = DType::kBF16) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(-scale, scale);
  Values values(count);
  for (double& x : values) x = RoundTo(precision, uniform(engine));
  return values;
}

// Magnitudes over twice as many binary orders, up to 2^orders, of either sign.
inline Values SpreadValues(int64_t count, uint32_t seed, double orders) {
  Values values = RandomValues(count, seed, orders, DType::kF32);
  const Values signs = RandomValues(count, seed + 1);
  for (int64_t i = 0; i < count; ++i) values[i] = RoundTo(DType::kF32, std::copysign(std::exp2(values[i]), signs[i]));
  return values;
}

class Owned {
 public:
  Owned(DType dtype, const Shape& shape) : memory_(new std::byte[shape.NumElements() * SizeOf(dtype) + 64]()) {
    tensor_ = {memory_.get(), dtype, DeviceType::kCpu, shape};
  }
  Owned(DType dtype, const Shape& shape, const Values& values) : Owned(dtype, shape) {
    for (int64_t i = 0; i < tensor_.size(); ++i) Set(i, values[i]);
  }
  void Set(int64_t i, double value) {
    switch (tensor_.dtype) {
      case DType::kF32: tensor_.as<float>()[i] = static_cast<float>(value); break;
      case DType::kBF16: tensor_.as<BFloat16>()[i] = ToBFloat16(static_cast<float>(value)); break;
      case DType::kF16: tensor_.as<Float16>()[i] = ToFloat16(static_cast<float>(value)); break;
      case DType::kI32: tensor_.as<int32_t>()[i] = static_cast<int32_t>(value); break;
      default: tensor_.as<uint8_t>()[i] = static_cast<uint8_t>(value);
    }
  }
  double operator[](int64_t i) const {
    switch (tensor_.dtype) {
      case DType::kF32: return tensor_.as<float>()[i];
      case DType::kBF16: return ToFloat(tensor_.as<BFloat16>()[i]);
      case DType::kF16: return ToFloat(tensor_.as<Float16>()[i]);
      case DType::kI32: return tensor_.as<int32_t>()[i];
      default: return tensor_.as<uint8_t>()[i];
    }
  }
  Values ToValues() const {
    Values values(tensor_.size());
    for (int64_t i = 0; i < tensor_.size(); ++i) values[i] = (*this)[i];
    return values;
  }
  operator const Tensor&() const { return tensor_; }  // NOLINT(google-explicit-constructor): it stands for its tensor.
  const Tensor& tensor() const { return tensor_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  Tensor tensor_;
};

// The four kinds of values that the CPU twins know.
struct Kind {
  DType storage, precision;
  // Relative size of half a step.
  double epsilon() const { return precision == DType::kBF16 ? 1.0 / 256 : precision == DType::kF16 ? 1.0 / 2048 : 1e-6; }
};
inline constexpr Kind kKinds[] = {
    {DType::kF32, DType::kF32}, {DType::kF32, DType::kBF16}, {DType::kBF16, DType::kBF16}, {DType::kF32, DType::kF16}};

// Every element within `relative` of the larger magnitude, or within `absolute`.
inline void ExpectNear(const Values& actual, const Values& expected, double relative, double absolute) {
  ASSERT_EQ(actual.size(), expected.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::fabs(actual[i] - expected[i]) <= absolute + relative * std::fabs(expected[i])) continue;
    if (++wrong <= 3) ADD_FAILURE() << "element " << i << " is " << actual[i] << ", expected " << expected[i];
  }
  EXPECT_EQ(wrong, 0) << "of " << actual.size();
}

// d function / d x by central differences in double precision.
inline Values NumericGradient(Values x, const std::function<double(const Values&)>& function, double step = 1e-5) {
  Values gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i];
    x[i] = kept + step;
    const double above = function(x);
    x[i] = kept - step;
    const double below = function(x);
    x[i] = kept;
    gradient[i] = (above - below) / (2 * step);
  }
  return gradient;
}

inline double Dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace mbridge::test
