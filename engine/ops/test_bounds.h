// For the operators' tests of 16-bit storage: what an operator may answer, derived from its definition alone.
//
// A Bounded is a value in double precision and how far from it F32 arithmetic can be, in any order and with or without fused
// multiply-adds (Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapters 2 and 3). Stored() rounds both ends to a
// 16-bit type, so most elements may have one value only and the others one of two neighbours.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "engine/ops/test_support.h"

namespace mbridge::test {

inline constexpr double kUnit = 0x1p-24;            // Relative error of an F32 operation; half an ulp.
inline constexpr double kTensorCoreUnit = 0x1p-22;  // Of a summand in tensor cores, which truncate.

struct Bounded {
  double value, error;
  Bounded(double value = 0, double error = 0) : value(value), error(error) {}  // NOLINT(google-explicit-constructor): exact ones.
  double most() const { return std::fabs(value) + error; }
};
using Bounds = std::vector<Bounded>;

// The result of one F32 operation; exact operands with a result that is an F32 value give just that.
inline Bounded InF32(double value, double error) {
  if (error == 0 && static_cast<float>(value) == value) return value;
  return {value, error + kUnit * (std::fabs(value) + error) + 0x1p-149};
}
inline Bounded operator-(const Bounded& x) { return {-x.value, x.error}; }
inline Bounded operator+(const Bounded& a, const Bounded& b) { return InF32(a.value + b.value, a.error + b.error); }
inline Bounded operator-(const Bounded& a, const Bounded& b) { return a + -b; }
inline Bounded operator*(const Bounded& a, const Bounded& b) {
  return InF32(a.value * b.value, a.most() * b.error + a.error * std::fabs(b.value));
}
// Or multiplied by the reciprocal. b is not near 0.
inline Bounded operator/(const Bounded& a, const Bounded& b) {
  const double quotient = a.value / b.value, error = (a.error + std::fabs(quotient) * b.error) / (std::fabs(b.value) - b.error);
  return {quotient, error + 2.01 * kUnit * (std::fabs(quotient) + error)};
}
inline Bounded Max(const Bounded& a, double b) { return {std::max(a.value, b), a.error}; }

// A number that the operator has as a float.
inline Bounded Constant(double value) { return {value, kUnit * std::fabs(value)}; }

// Rounded to nearest, ties to even.
inline Bounded Stored(const Bounded& x, DType precision) {
  const double low = RoundTo(precision, x.value - x.error), high = RoundTo(precision, x.value + x.error);
  return {(low + high) / 2, (high - low) / 2};
}

// Of F32 values in any order.
class Sum {
 public:
  void Add(const Bounded& x) {
    value_ += x.value;
    error_ += x.error;
    magnitude_ += x.most();
    ++count_;
  }
  // `unit`: relative error of each addition.
  Bounded Total(double unit = kUnit) const {
    return {value_, error_ + 1.01 * unit * static_cast<double>(unit == kUnit ? std::max(count_ - 1, 0) : count_) * magnitude_};
  }

 private:
  double value_ = 0, error_ = 0, magnitude_ = 0;
  int count_ = 0;
};

// Functions: at most the errors of CUDA's fast intrinsics (CUDA C++ Programming Guide, "Mathematical Functions"), which are
// larger than those of its precise ones and of the CPU's (cpu/vector_math.h). An ulp is two units.
inline double ExpUnits(double x) { return 2 * (2 + 1.173 * std::fabs(x)); }  // __expf.
inline Bounded Exp(const Bounded& x) {
  const double value = std::exp(x.value);
  return {value, value * (std::expm1(x.error) + std::exp(x.error) * ExpUnits(x.value) * kUnit) + 0x1p-126};
}
// exp(z - largest) as a running softmax makes it: products with log2(e) are rounded before the difference, and a sum so far is
// multiplied by exp(before - after) at each of up to `moves` of the maximum, which together go no further than z is away.
inline Bounded SoftmaxPower(double z, double largest, int64_t moves = 0) {
  const Bounded power = Exp({z - largest, kUnit * (std::fabs(z) + std::fabs(largest))});
  return {power.value, power.error + static_cast<double>(moves) * (ExpUnits(0) + 1) * kUnit * power.value};
}
// 1 / (1 + __expf(-x)) with __fdividef, which is 2 ulp off.
inline Bounded Sigmoid(const Bounded& x) {
  const double s = 1 / (1 + std::exp(-x.value));
  const double slope = s * (1 - s) * std::exp(x.error);
  return {s, slope * x.error + 1.01 * (slope * ExpUnits(x.value) + 5 * s) * kUnit};
}
inline Bounded Tanh(const Bounded& x) {
  const double t = std::tanh(x.value);
  return {t, x.error + 3e-7 * std::fabs(t)};
}
inline Bounded Erf(const Bounded& x) { return {std::erf(x.value), 2 / std::sqrt(M_PI) * x.error + 4 * kUnit}; }
inline Bounded Log(const Bounded& x) {
  const double value = std::log(x.value);
  return {value, -std::log1p(-x.error / x.value) + 2 * kUnit * std::fabs(value)};
}
inline Bounded Sqrt(const Bounded& x) {
  const double value = std::sqrt(x.value);
  return InF32(value, value - std::sqrt(x.value - x.error));
}

// 0.5 (1 + erf(u / sqrt(2))), or of the tanh approximation.
inline Bounded GeluHalf(bool tanh, const Bounded& u) {
  if (tanh) return Sigmoid(2 * (Constant(0.79788456) * u * (1 + Constant(0.044715) * u * u)));
  return 0.5 * (1 + Erf(u * Constant(std::sqrt(0.5))));
}
inline Bounded Gelu(bool tanh, const Bounded& u) { return u * GeluHalf(tanh, u); }
inline Bounded GeluSlope(bool tanh, const Bounded& u) {
  const Bounded half = GeluHalf(tanh, u);
  if (!tanh) return half + u * (Constant(1 / std::sqrt(2 * M_PI)) * Exp(-0.5 * u * u));
  const Bounded one_minus_square = 4 * half * (1 - half);
  return 0.5 * u * one_minus_square * (Constant(0.79788456) + Constant(0.1070322243) * u * u) + half;
}

// 16-bit types as training stores them; F16 values in F32 on the CPU, whose twins know no F16 storage.
inline std::vector<Kind> NarrowKinds() {
  return {{DType::kBF16, DType::kBF16}, {g_on_device ? DType::kF16 : DType::kF32, DType::kF16}};
}

// Narrower than a vector of 8, odd, prime, whole vectors, and just above what a warp, a block or a tile takes.
struct AwkwardShape {
  int64_t rows, width;
  int64_t size() const { return rows * width; }
};
inline constexpr AwkwardShape kAwkwardShapes[] = {{1, 1},   {3, 7},    {5, 33},   {3, 127},  {67, 40},
                                                  {7, 264}, {3, 2047}, {1, 2050}, {3, 2056}, {1, 4097}};

// Every element within its bound; `what` names the operator, its variant and the result.
inline void ExpectBounded(const std::string& what, const Kind& kind, const Owned& actual, const Bounds& expected) {
  ASSERT_EQ(actual.tensor().size(), static_cast<int64_t>(expected.size())) << what;
  int64_t wrong = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double is = actual[static_cast<int64_t>(i)];
    if (std::fabs(is - expected[i].value) <= expected[i].error) continue;
    if (++wrong > 3) continue;
    ADD_FAILURE() << what << ", values of " << NameOf(kind.precision) << " in " << NameOf(kind.storage) << ", result "
                  << NameOf(actual.tensor().dtype) << " " << actual.tensor().shape.ToString() << ", element " << i << ": " << is
                  << ", expected " << expected[i].value << " +- " << expected[i].error;
  }
  EXPECT_EQ(wrong, 0) << "of " << expected.size() << " elements of " << what;
}

}  // namespace mbridge::test
