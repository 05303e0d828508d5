// The optimizer's passes over the parameter buffers, in pieces: sums of squares, zeros, and the AdamW update.
#pragma once

#include <cstdint>

#include "engine/core/op.h"
#include "engine/optim/adam.h"

namespace mbridge {

// A run of elements of one parameter. Sums are taken piece by piece and pieces do not depend on the ranks' shares, so that
// neither threads nor shards change a bit.
struct UpdatePiece {
  int64_t begin = 0;  // Element offset in the whole buffers.
  int32_t count = 0;
  int32_t decays = 0;  // 1: weight decay applies.
};

// `pieces` lies in the memory of the context's device.
struct PieceList {
  const UpdatePiece* pieces = nullptr;
  int64_t count = 0;
};

// sums[i] = sum of (x * scale)^2 over piece i: the product in F32, squares and sum in F64. data (F32, BF16 or F16)
// holds the buffer's elements from `origin` on; sums F64 [pieces].
extern Op<void(const Context&, const Tensor& data, int64_t origin, const PieceList& pieces, float scale, const Tensor& sums)>
    SumOfSquares;

// totals[p] = sum of sums[i] for i in [firsts[p], firsts[p + 1]), in an order that depends on the counts alone. sums F64 [n],
// firsts I64 [p + 1], totals F64 [p].
extern Op<void(const Context&, const Tensor& sums, const Tensor& firsts, const Tensor& totals)> SumByParameter;

// count I64 [1] = elements of the pieces that are equal to 0. data F32.
extern Op<void(const Context&, const Tensor& data, int64_t origin, const PieceList& pieces, const Tensor& count)> CountZeros;

struct AdamBuffers {
  Tensor gradient;       // F32, the whole buffer; read only.
  Tensor first, second;  // Moments, F32 or both BF16 (rounded to nearest), elements from `origin` on; updated in place.
  Tensor master;         // F32, from `origin` on, updated in place. Empty with `remainder`.
  Tensor value;          // The whole buffer in the model's dtype: gets the rounded master. Empty where the master is the value.
  Tensor remainder;  // From `origin` on, 16 raw bits an element (called BF16): with a BF16 `value` it is the master. Or empty.
  int64_t origin = 0;
};

// A master as BF16 value and remainder: the remainder is the F32's lower half, the value the upper half plus the lower's top bit,
// so rounded to nearest, ties up (TransformerEngine's store_param_remainders). The upper half is the value less that bit.

// adam.h's update of every element of the pieces, to the bit on every device.
extern Op<void(const Context&, const AdamBuffers& buffers, const PieceList& pieces, const AdamFactors& decay,
               const AdamFactors& no_decay)>
    UpdatePieces;

}  // namespace mbridge
