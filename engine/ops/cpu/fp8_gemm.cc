#include "engine/ops/fp8_gemm.h"

#include <cfloat>
#include <vector>

#include "engine/ops/block_quantize.h"
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

void DelayedScalesCpu(const Context&, const Tensor& history, bool most_recent, const Fp8ScaleOptions& options,
                      const Tensor& scale, const Tensor& inverse) {
  const int64_t length = history.shape[0], count = history.shape[1];
  float* values = history.as<float>();
  for (int64_t i = 0; i < count; ++i) {
    const float newest = std::isfinite(values[i]) ? values[i] : 0.0f;
    float largest = newest;
    if (!most_recent) {
      for (int64_t row = 1; row < length; ++row) largest = std::fmax(largest, values[row * count + i]);
    }
    scale.as<float>()[i] = ScaleOf(largest, options);
    inverse.as<float>()[i * kFp8ScalePitch] = 1.0f / scale.as<float>()[i];
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

void QuantizeByAmaxCpu(const Context& context, const Tensor& x, const Fp8ScaleOptions& options, const Tensor& scales,
                       const Tensor& rowwise, const Tensor& columnwise) {
  auto* values = scales.as<float>();
  values[kFp8ScalePitch] = ScaleOf(values[0], options);
  values[2 * kFp8ScalePitch] = 1.0f / values[kFp8ScalePitch];
  const Tensor scale{&values[kFp8ScalePitch], DType::kF32, scales.device, {1}};
  QuantizeCpu(context, x, scale, options.format, rowwise, columnwise, {});
}

void BlockQuantizeCpu(const Context& context, const Tensor& x, Fp8Format format, bool squares, const Tensor& codes,
                      const Tensor& scales, const Tensor& transposed, const Tensor& transposed_scales) {
  CheckFp8BlockQuantize(x, squares, codes, scales, transposed, transposed_scales);
  const int64_t rows = x.shape[0], cols = x.shape[1], across = cols / kFp8Block, down = rows / kFp8Block;
  const BlockQuantizeOptions options{.element = format == Fp8Format::kE4M3 ? kE4M3Float : kE5M2Float};
  const int64_t pitch = (across + 3) / 4 * 4, transposed_pitch = (down + 3) / 4 * 4;
  WithElements(x, [&](const auto* values) {
    const auto at = [&](int64_t row, int64_t col) { return ToFloat(values[row * cols + col]); };
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t block_row = 0; block_row < down; ++block_row) {
      for (int64_t block_col = 0; block_col < across; ++block_col) {
        const int64_t first_row = block_row * kFp8Block, first_col = block_col * kFp8Block;
        float of_rows[kFp8Block] = {}, of_cols[kFp8Block] = {}, of_all = 0.0f;
        for (int64_t r = 0; r < kFp8Block; ++r) {
          for (int64_t c = 0; c < kFp8Block; ++c) {
            const float magnitude = std::fabs(at(first_row + r, first_col + c));
            of_rows[r] = std::fmax(of_rows[r], magnitude);
            of_cols[c] = std::fmax(of_cols[c], magnitude);
          }
          of_all = std::fmax(of_all, of_rows[r]);
        }
        for (int64_t i = 0; i < kFp8Block; ++i) {
          of_rows[i] = BlockStep(squares ? of_all : of_rows[i], options, 1.0f);
          of_cols[i] = BlockStep(squares ? of_all : of_cols[i], options, 1.0f);
          if (squares) continue;
          if (!scales.empty()) scales.as<float>()[block_col * rows + first_row + i] = of_rows[i];
          if (!transposed_scales.empty()) transposed_scales.as<float>()[block_row * cols + first_col + i] = of_cols[i];
        }
        if (squares && !scales.empty()) scales.as<float>()[block_row * pitch + block_col] = of_rows[0];
        if (squares && !transposed_scales.empty()) {
          transposed_scales.as<float>()[block_col * transposed_pitch + block_row] = of_rows[0];
        }
        for (int64_t r = 0; r < kFp8Block; ++r) {
          for (int64_t c = 0; c < kFp8Block; ++c) {
            const int64_t row = first_row + r, col = first_col + c;
            if (!codes.empty()) codes.as<uint8_t>()[row * cols + col] = ToFp8(at(row, col) / of_rows[r], format);
            if (!transposed.empty()) transposed.as<uint8_t>()[col * rows + row] = ToFp8(at(row, col) / of_cols[c], format);
          }
        }
      }
    }
  });
}

void BlockProductsCpu(const Context&, bool* available) { *available = true; }

// Of an element whose scale is its own.
float ScaleAt(const Fp8Matrix& x, int64_t row, int64_t col) {
  const int64_t across = x.cols / kFp8Block;
  if (x.scaling == Fp8Scaling::kVectors) return x.inverse_scale[col / kFp8Block * x.rows + row];
  return x.inverse_scale[row / kFp8Block * ((across + 3) / 4 * 4) + col / kFp8Block];
}

// Dense F32 values of the matrix, without a tensor's scale.
std::vector<float> Decoded(const Fp8Matrix& x) {
  std::vector<float> values(x.rows * x.cols);
  const auto* codes = static_cast<const uint8_t*>(x.data);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t col = 0; col < x.cols; ++col) {
      const float value = FromFp8(codes[row * x.stride + col], x.format);
      values[row * x.cols + col] = x.scaling == Fp8Scaling::kTensor ? value : value * ScaleAt(x, row, col);
    }
  }
  return values;
}

void GemmCpu(const Context& context, const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions& options) {
  CheckFp8Gemm(a, b, c, options);
  std::vector<float> left = Decoded(a), right = Decoded(b);
  Gemm(context, {left.data(), DType::kF32, a.rows, a.cols, a.cols}, {right.data(), DType::kF32, b.rows, b.cols, b.cols}, c,
       {.transpose_b = true,
        .accumulate = options.accumulate,
        .alpha = a.scaling == Fp8Scaling::kTensor ? *a.inverse_scale * *b.inverse_scale : 1.0f});
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&)> Fp8Amax{&AmaxCpu};
Op<void(const Context&, const Tensor&, bool, const Fp8ScaleOptions&, const Tensor&, const Tensor&)> Fp8DelayedScales{
    &DelayedScalesCpu};
Op<void(const Context&, const Tensor&, const Tensor&, Fp8Format, const Tensor&, const Tensor&, const Tensor&)> Fp8Quantize{
    &QuantizeCpu};
Op<void(const Context&, const Tensor&, const Fp8ScaleOptions&, const Tensor&, const Tensor&, const Tensor&)> Fp8QuantizeByAmax{
    &QuantizeByAmaxCpu};
Op<void(const Context&, const Tensor&, Fp8Format, bool, const Tensor&, const Tensor&, const Tensor&, const Tensor&)>
    Fp8BlockQuantize{&BlockQuantizeCpu};
Op<void(const Context&, bool*)> Fp8BlockProducts{&BlockProductsCpu};
Op<void(const Context&, const Fp8Matrix&, const Fp8Matrix&, const Matrix&, const Fp8GemmOptions&)> Fp8Gemm{&GemmCpu};

void CheckFp8Gemm(const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions& options) {
  if (a.cols != b.cols || a.rows != c.rows || b.rows != c.cols) {
    ThrowEngineError("8-bit product [{}, {}] x [{}, {}]^T into [{}, {}]", a.rows, a.cols, b.rows, b.cols, c.rows, c.cols);
  }
  if (!FitsFp8Gemm(a.rows, b.rows, a.cols) || a.stride % 16 != 0 || b.stride % 16 != 0 || c.stride % 16 != 0) {
    ThrowEngineError("8-bit product [{}, {}] x [{}, {}]^T with strides {}, {}, {}: multiples of 16 only", a.rows, a.cols, b.rows,
                     b.cols, a.stride, b.stride, c.stride);
  }
  if (a.scaling != Fp8Scaling::kTensor || b.scaling != Fp8Scaling::kTensor) {
    const bool blocks = a.rows % kFp8Block == 0 && b.rows % kFp8Block == 0 && a.cols % kFp8Block == 0;
    if (!blocks || a.scaling == Fp8Scaling::kTensor || b.scaling == Fp8Scaling::kTensor) {
      ThrowEngineError("8-bit product [{}, {}] x [{}, {}]^T: multiples of {} for scales of blocks, in both operands", a.rows,
                       a.cols, b.rows, b.cols, kFp8Block);
    }
    if (a.scaling == Fp8Scaling::kSquares && b.scaling == Fp8Scaling::kSquares)
      ThrowEngineError("8-bit product of two matrices with scales of squares");
  }
  for (const Fp8Matrix* x : {&a, &b}) {
    if (reinterpret_cast<uintptr_t>(x->inverse_scale) % 16 != 0) {
      ThrowEngineError("8-bit product: the address of a scale is {}, not a multiple of 16",
                       static_cast<const void*>(x->inverse_scale));
    }
  }
  if (a.format == Fp8Format::kE5M2 && b.format == Fp8Format::kE5M2) ThrowEngineError("8-bit product of two E5M2 matrices");
  if (options.accumulate && c.dtype != DType::kF32) ThrowEngineError("product added to {}: F32 only", NameOf(c.dtype));
}

void CheckFp8BlockQuantize(const Tensor& x, bool squares, const Tensor& codes, const Tensor& scales, const Tensor& transposed,
                           const Tensor& transposed_scales) {
  const bool whole = x.shape.rank() == 2 && x.shape[0] % kFp8Block == 0 && x.shape[1] % kFp8Block == 0;
  if (!whole) ThrowEngineError("8-bit copy of {} by blocks: multiples of {}", x.shape.ToString(), kFp8Block);
  const Fp8Scaling scaling = squares ? Fp8Scaling::kSquares : Fp8Scaling::kVectors;
  const auto fits = [&](const Tensor& bits, const Tensor& of_blocks, int64_t rows, int64_t cols) {
    return bits.empty() == of_blocks.empty() &&
           (bits.empty() || (bits.size() == x.size() && of_blocks.size() == Fp8ScaleCount(scaling, rows, cols)));
  };
  if (!fits(codes, scales, x.shape[0], x.shape[1]) || !fits(transposed, transposed_scales, x.shape[1], x.shape[0])) {
    ThrowEngineError("8-bit copies of {} by blocks into {} with {} and {} with {}", x.shape.ToString(), codes.shape.ToString(),
                     scales.shape.ToString(), transposed.shape.ToString(), transposed_scales.shape.ToString());
  }
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
