#include "engine/ops/fp8_gemm.h"

#include <cfloat>
#include <vector>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

// f(pointer) of the tensor's elements.
template <class F> void WithElements(const Tensor& x, F&& f) {
  switch (x.dtype) {
    case DType::kF32: return f(x.as<float>());
    case DType::kBF16: return f(x.as<BFloat16>());
    case DType::kF16: return f(x.as<Float16>());
    default: ThrowEngineError("no 8-bit copy of {}", NameOf(x.dtype));
  }
}

void AmaxCpu(const Context&, const Tensor& x, const Tensor& amax) {
  float largest = *amax.as<float>();
  WithElements(x, [&](const auto* values) {
    const int64_t count = x.size();
#pragma omp parallel for schedule(static) reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(ToFloat(values[i])));
  });
  *amax.as<float>() = largest;
}

float ScaleOf(float amax, const Fp8ScaleOptions& o) {
  if (!(amax > 0.0f) || !std::isfinite(amax)) return 1.0f;
  float scale = LargestOf(o.format) / amax * std::ldexp(1.0f, -o.margin);
  if (std::isinf(scale)) scale = FLT_MAX;
  return o.power_of_two ? std::ldexp(1.0f, std::ilogb(scale)) : scale;
}

void ScalesCpu(const Context&, const Tensor& amax, const Fp8ScaleOptions& options, const Tensor& scale, const Tensor& inverse) {
  for (int64_t i = 0; i < amax.size(); ++i) {
    scale.as<float>()[i] = ScaleOf(amax.as<float>()[i], options);
    inverse.as<float>()[i] = 1.0f / scale.as<float>()[i];
  }
}

void DelayedScalesCpu(const Context&, const Tensor& history, bool most_recent, const Fp8ScaleOptions& options,
                      const Tensor& scale, const Tensor& inverse) {
  const int64_t length = history.shape[0], count = history.shape[1];
  float* values = history.as<float>();
  for (int64_t i = 0; i < count; ++i) {
    float largest = values[i];
    if (!most_recent) {
      for (int64_t row = 1; row < length; ++row) largest = std::fmax(largest, values[row * count + i]);
    }
    scale.as<float>()[i] = ScaleOf(largest, options);
    inverse.as<float>()[i] = 1.0f / scale.as<float>()[i];
    const float newest = values[i];
    for (int64_t row = 0; row + 1 < length; ++row) values[row * count + i] = values[(row + 1) * count + i];
    values[(length - 1) * count + i] = newest;
    values[i] = 0.0f;
  }
}

void QuantizeCpu(const Context& context, const Tensor& x, const Tensor& scale, Fp8Format format, const Tensor& rowwise,
                 const Tensor& columnwise, const Tensor& amax) {
  CheckFp8Quantize(x, scale, rowwise, columnwise);
  const int64_t rows = x.shape[0], cols = x.shape[1];
  const float factor = *scale.as<float>();
  WithElements(x, [&](const auto* values) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        const uint8_t code = ToFp8(ToFloat(values[row * cols + col]) * factor, format);
        if (!rowwise.empty()) rowwise.as<uint8_t>()[row * cols + col] = code;
        if (!columnwise.empty()) columnwise.as<uint8_t>()[col * rows + row] = code;
      }
    }
  });
  if (!amax.empty()) AmaxCpu(context, x, amax);
}

// Dense F32 values of the matrix.
std::vector<float> Decoded(const Fp8Matrix& x) {
  std::vector<float> values(x.rows * x.cols);
  const auto* codes = static_cast<const uint8_t*>(x.data);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t col = 0; col < x.cols; ++col) values[row * x.cols + col] = FromFp8(codes[row * x.stride + col], x.format);
  }
  return values;
}

void GemmCpu(const Context& context, const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions& options) {
  CheckFp8Gemm(a, b, c, options);
  std::vector<float> left = Decoded(a), right = Decoded(b);
  Gemm(context, {left.data(), DType::kF32, a.rows, a.cols, a.cols}, {right.data(), DType::kF32, b.rows, b.cols, b.cols}, c,
       {.transpose_b = true, .accumulate = options.accumulate, .alpha = *a.inverse_scale * *b.inverse_scale});
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&)> Fp8Amax{&AmaxCpu};
Op<void(const Context&, const Tensor&, const Fp8ScaleOptions&, const Tensor&, const Tensor&)> Fp8Scales{&ScalesCpu};
Op<void(const Context&, const Tensor&, bool, const Fp8ScaleOptions&, const Tensor&, const Tensor&)> Fp8DelayedScales{
    &DelayedScalesCpu};
Op<void(const Context&, const Tensor&, const Tensor&, Fp8Format, const Tensor&, const Tensor&, const Tensor&)> Fp8Quantize{
    &QuantizeCpu};
Op<void(const Context&, const Fp8Matrix&, const Fp8Matrix&, const Matrix&, const Fp8GemmOptions&)> Fp8Gemm{&GemmCpu};

void CheckFp8Gemm(const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions& options) {
  if (a.cols != b.cols || a.rows != c.rows || b.rows != c.cols) {
    ThrowEngineError("8-bit product [{}, {}] x [{}, {}]^T into [{}, {}]", a.rows, a.cols, b.rows, b.cols, c.rows, c.cols);
  }
  if (!FitsFp8Gemm(a.rows, b.rows, a.cols) || a.stride % 16 != 0 || b.stride % 16 != 0 || c.stride % 16 != 0) {
    ThrowEngineError("8-bit product [{}, {}] x [{}, {}]^T with strides {}, {}, {}: multiples of 16 only", a.rows, a.cols, b.rows,
                     b.cols, a.stride, b.stride, c.stride);
  }
  if (a.format == Fp8Format::kE5M2 && b.format == Fp8Format::kE5M2) ThrowEngineError("8-bit product of two E5M2 matrices");
  if (options.accumulate && c.dtype != DType::kF32) ThrowEngineError("product added to {}: F32 only", NameOf(c.dtype));
}

void CheckFp8Quantize(const Tensor& x, const Tensor& scale, const Tensor& rowwise, const Tensor& columnwise) {
  if (x.shape.rank() != 2 || x.shape[0] % 16 != 0 || x.shape[1] % 16 != 0) {
    ThrowEngineError("8-bit copy of {}: two dimensions, multiples of 16", x.shape.ToString());
  }
  if (scale.dtype != DType::kF32 || scale.size() != 1) ThrowEngineError("8-bit copy with a scale of {}", scale.shape.ToString());
  for (const Tensor& copy : {rowwise, columnwise}) {
    if (!copy.empty() && (copy.dtype != DType::kU8 || copy.size() != x.size())) {
      ThrowEngineError("8-bit copy of {} into {}{}", x.shape.ToString(), NameOf(copy.dtype), copy.shape.ToString());
    }
  }
}

}  // namespace mbridge
