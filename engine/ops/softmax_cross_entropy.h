// Cross entropy of whole rows of logits, which one rank holds: loss and gradient in one operation, the gradient in the logits'
// place. vocab_cross_entropy.h does the same in tiles of columns.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// loss = log(sum of exp(logit - maximum)) - (label's logit - maximum), F32 [rows]. With `weight` (F32 [rows]) the logits [rows,
// V] become the gradient of sum over rows of weight * loss: round((softmax - [column is the label]) * weight), rounded to
// `gradient_precision`; without (empty) they stay. labels I32 [rows], in range: the caller has checked.
extern Op<void(const Context&, const Tensor& logits, const Tensor& labels, const Tensor& weight, DType gradient_precision,
               const Tensor& loss)>
    SoftmaxCrossEntropy;

}  // namespace mbridge
