// Cross entropy over a large vocabulary, in tiles of columns so that no [tokens, V] F32 copy is ever made: the output layer's
// product makes a tile of logits, the tile is rounded, kept compactly and folded into each row's running maximum and sum of
// exponentials; backward makes tiles of logit gradients (megatron/core/tensor_parallel/cross_entropy.py).
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// Per row (token): what the loss and its gradient need. F32 [rows] each.
struct CrossEntropyState {
  Tensor maximum;    // Of the logits so far.
  Tensor sum;        // Of exp(logit - maximum) so far.
  Tensor predicted;  // The label's logit, once its column was seen; 0 until then.
};

// Empties the state for new rows.
extern Op<void(const Context&, const CrossEntropyState& state)> CrossEntropyBegin;

// Folds columns [first, first + n) in. tile [rows, >= n] holds their logits (unrounded F32, or of `precision`) in its first n
// columns; they are rounded to `precision` and copied to the same columns of `logits` [rows, V] (dtype `precision`), unless that
// is empty. labels I32 [rows].
extern Op<void(const Context&, const Tensor& tile, int64_t first, int64_t n, const Tensor& labels, DType precision,
               const CrossEntropyState& state, const Tensor& logits)>
    CrossEntropyFold;

// Moves the sum to another maximum, at least as large: sum *= exp(maximum - largest), maximum = largest [rows]. Joins states of
// several parts of the vocabulary: `largest` their common maximum, then the sums and the predicted logits are added up.
extern Op<void(const Context&, const CrossEntropyState& state, const Tensor& largest)> CrossEntropyRescale;

// loss = log(sum) - (predicted - maximum), F32 [rows].
extern Op<void(const Context&, const CrossEntropyState& state, const Tensor& loss)> CrossEntropyLoss;

// Gradient of sum over rows of weight * loss, for columns [first, first + n): the first n columns of tile (F32, or BF16) become
// round((exp(logit - maximum) / sum - [column is the label]) * weight), rounded to `gradient_precision`. weight F32 [rows].
extern Op<void(const Context&, const Tensor& logits, int64_t first, int64_t n, const Tensor& labels, const Tensor& weight,
               const CrossEntropyState& state, DType gradient_precision, const Tensor& tile)>
    CrossEntropyGradient;

}  // namespace mbridge
