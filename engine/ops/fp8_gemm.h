// Matrix products of 8-bit floats with one scale for each tensor, and what makes their operands: delayed and current scaling as
// Transformer Engine has them. The CPU twins compute the same by emulation.
#pragma once

#include "engine/ops/fp8.h"
#include "engine/ops/gemm.h"

namespace mbridge {

// amax [1] F32 = max(amax, largest |x|); x F32, BF16 or F16. NaN is passed over.
extern Op<void(const Context&, const Tensor& x, const Tensor& amax)> Fp8Amax;

// scale = largest value of the format / amax / 2^margin, where amax is a tensor's largest value; 1 where that is 0 or not finite,
// and F32's largest value instead of one beyond.
struct Fp8ScaleOptions {
  Fp8Format format = Fp8Format::kE4M3;
  int margin = 0;             // Powers of two to stay below the largest value.
  bool power_of_two = false;  // Scales are rounded down to powers of two.
};

// F32 values between scales that products read: cuBLASLt 13.1 refuses addresses that are no multiples of 16 bytes.
inline constexpr int64_t kFp8ScalePitch = 4;

// Delayed scaling of n tensors at the end of a step: scale [n] and inverse = 1 / scale [n, kFp8ScalePitch] (its first column)
// from the largest of history [length, n] F32 (or with most_recent from its row 0, where the step's maxima were taken; one that
// is not finite counts as 0: an overflow says nothing of the next step); then the rows move up by one, row 0 goes last, and the
// new row 0 is 0.
extern Op<void(const Context&, const Tensor& history, bool most_recent, const Fp8ScaleOptions&, const Tensor& scale,
               const Tensor& inverse)>
    Fp8DelayedScales;

// rowwise [rows, cols] U8 = fp8(x scale) and columnwise [cols, rows] its transpose, either may be empty; x [rows, cols] F32, BF16
// or F16, scale [1] F32. amax [1] (or empty) as Fp8Amax, of x itself. rows and cols are multiples of 16.
extern Op<void(const Context&, const Tensor& x, const Tensor& scale, Fp8Format format, const Tensor& rowwise,
               const Tensor& columnwise, const Tensor& amax)>
    Fp8Quantize;

// Current scaling: as Fp8Quantize with the scale of scales[0], the tensor's largest value (of this x or an upper bound). scales
// [3, kFp8ScalePitch] F32, the first column: scales[1] = the scale and scales[2] = 1 / scale are written.
extern Op<void(const Context&, const Tensor& x, const Fp8ScaleOptions&, const Tensor& scales, const Tensor& rowwise,
               const Tensor& columnwise)>
    Fp8QuantizeByAmax;

// What shares a scale: the tensor, 128 neighbours of a row, or 128 x 128.
enum class Fp8Scaling : uint8_t { kTensor, kVectors, kSquares };

// Both sides of operands with several scales are multiples of this.
inline constexpr int64_t kFp8Block = 128;

// Scales of a [rows, cols] matrix: [1], [cols / 128, rows], or [rows / 128, cols / 128 rounded up to a multiple of 4].
constexpr int64_t Fp8ScaleCount(Fp8Scaling scaling, int64_t rows, int64_t cols) {
  if (scaling == Fp8Scaling::kTensor) return 1;
  const int64_t across = cols / kFp8Block;
  return scaling == Fp8Scaling::kVectors ? across * rows : rows / kFp8Block * ((across + 3) / 4 * 4);
}

// Blockwise scaling of x [rows, cols] F32, BF16 or F16 (on CUDA BF16 or F16), both multiples of 128: codes [rows, cols] with
// their scales by 128 neighbours of a row, and codes of the transpose [cols, rows] with theirs; or by `squares`, which are the
// same for both. A scale is the smallest power of two whose multiples of the format hold the block; 1 for a block of zeros. A
// pair may be empty. Equal to BlockQuantize with kFp8.
extern Op<void(const Context&, const Tensor& x, Fp8Format format, bool squares, const Tensor& codes, const Tensor& scales,
               const Tensor& transposed, const Tensor& transposed_scales)>
    Fp8BlockQuantize;

// Sets `available`: whether Fp8Gemm takes kVectors and kSquares here (Hopper, by cuBLASLt; the CPU twin).
extern Op<void(const Context&, bool* available)> Fp8BlockProducts;

// A row-major matrix of 8-bit floats, which stands for its values times their scale.
struct Fp8Matrix {
  void* data = nullptr;
  Fp8Format format = Fp8Format::kE4M3;
  const float* inverse_scale = nullptr;  // On the device of the data; Fp8ScaleCount of them, from a multiple of 16 bytes on.
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  Fp8Scaling scaling = Fp8Scaling::kTensor;
};

struct Fp8GemmOptions {
  bool accumulate = false;       // Adds to c (F32 only).
  bool fast_accumulate = false;  // The tensor cores keep about 14 bits of a sum between instructions: for the forward.
};

// c [m, n] = a [m, k] b [n, k]^T (+ c), sums in F32; c BF16, F16 or F32. Only this transposition exists on Hopper: gradients take
// columnwise operands. m, n, k and the strides are multiples of 16; not both operands may be E5M2. Both have
// one scale or both have several, then not both by squares, and all sides are multiples of 128.
extern Op<void(const Context&, const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions&)> Fp8Gemm;

// Whether a product of this shape can be taken in 8 bits.
constexpr bool FitsFp8Gemm(int64_t m, int64_t n, int64_t k) { return m % 16 == 0 && n % 16 == 0 && k % 16 == 0; }

// Throws EngineError for operands that do not fit.
void CheckFp8Gemm(const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions& options);
void CheckFp8BlockQuantize(const Tensor& x, bool squares, const Tensor& codes, const Tensor& scales, const Tensor& transposed,
                           const Tensor& transposed_scales);
void CheckFp8Quantize(const Tensor& x, const Tensor& scale, const Tensor& rowwise, const Tensor& columnwise);

}  // namespace mbridge
