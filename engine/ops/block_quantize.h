// What operands become when blocks of them share a scale, for formats whose matrix products the device does not have: values are
// quantised and widened again, and an ordinary product follows (its sums are as the native product's, in F32).
#pragma once

#include "engine/core/op.h"
#include "engine/ops/narrow_float.h"

namespace mbridge {

enum class BlockFormat : uint8_t {
  kFp8,    // 128 elements, the scale a power of two that uses the format's range best (Transformer Engine's blockwise recipe).
  kMxfp8,  // 32 elements, the scale the smallest power of two that holds the block (OCP Microscaling, E8M0).
  kNvfp4,  // 16 elements in E2M1, the scale in E4M3 relative to one F32 scale of the tensor, so that the largest block's is 448.
};

constexpr int64_t BlockLength(BlockFormat format) {
  return format == BlockFormat::kFp8 ? 128 : (format == BlockFormat::kMxfp8 ? 32 : 16);
}

struct BlockQuantizeOptions {
  BlockFormat format = BlockFormat::kFp8;
  NarrowFloat element = kE4M3Float;
  bool square = false;      // A scale for each n x n, as weights have it; otherwise for n neighbours.
  bool down_rows = false;   // Neighbours stand in a column.
  bool stochastic = false;  // Elements are rounded up or down by chance, from `seed` and their place.
  uint64_t seed = 0;
};

// y [rows, cols] = the values that x stands for once quantised; both F32, BF16 or F16 (y rounded to its type), y may be x. Blocks
// at the end may be shorter. amax F32 [1]: the largest |x|, with kNvfp4.
extern Op<void(const Context&, const Tensor& x, const BlockQuantizeOptions&, const Tensor& amax, const Tensor& y)> BlockQuantize;

// y = x [rows, cols] with each 16 neighbours of a column multiplied by a random sign each and by the normalised Hadamard matrix:
// the product of two matrices over their rows stays what it is. rows is a multiple of 16; y may be x.
extern Op<void(const Context&, const Tensor& x, const Tensor& y)> HadamardDownRows;

inline constexpr int kHadamardSize = 16;
inline constexpr uint16_t kHadamardSigns = 0x9e37;  // Bit i: element i changes its sign.

inline constexpr float kLargestBlockScale = 448.0f;  // Of NVFP4: E4M3's largest.

// 1 / scale of a block: what its elements are divided by.
MB_HOST_DEVICE inline float BlockStep(float block_amax, const BlockQuantizeOptions& options, float tensor_step) {
  const float wanted = block_amax / options.element.largest;
  if (options.format == BlockFormat::kNvfp4) {
    const NarrowFloat of_scales{3, -6, kLargestBlockScale};
    return RoundTo(wanted / tensor_step, of_scales) * tensor_step;
  }
  if (!(block_amax > 0.0f) || !(block_amax < INFINITY)) return 1.0f;
  // The smallest power of two that is no less.
  int exponent = ilogbf(wanted);
  if (PowerOfTwo(exponent) < wanted) ++exponent;
  return PowerOfTwo(exponent < -126 ? -126 : exponent);
}

// NVFP4's scale of the tensor: the largest block's is then E4M3's largest.
MB_HOST_DEVICE inline float TensorStep(float amax, const BlockQuantizeOptions& options) {
  if (!(amax > 0.0f) || !(amax < INFINITY)) return 1.0f;
  return amax / (options.element.largest * kLargestBlockScale);
}

MB_HOST_DEVICE inline float QuantizedValue(float x, float step, const BlockQuantizeOptions& options, int64_t place) {
  if (!(step > 0.0f)) return 0.0f;
  const float scaled = x / step;
  if (!options.stochastic) return RoundTo(scaled, options.element) * step;
  return RoundStochastically(scaled, options.element, UniformAt(options.seed, static_cast<uint64_t>(place))) * step;
}

void CheckBlockQuantize(const Tensor& x, const BlockQuantizeOptions& options, const Tensor& amax, const Tensor& y);

}  // namespace mbridge
