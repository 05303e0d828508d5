// Token and position embeddings. Ids are [b, s]; activations are sequence-first [s, b, h].
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// y[s, b] = round(words[tokens[b, s]] + positions[position_ids[b, s]]), with `keep` ([s, b, h] U8, or empty) followed by eager
// dropout. words [V, h], positions [P, h] or empty. Without positions an id below 0 gives zeros: a word of another rank's table.
// Ids must be in range otherwise: the caller has checked. y may be `words` if each row's id is its own place in y.
extern Op<void(const Context&, const Tensor& tokens, const Tensor& position_ids, const Tensor& words, const Tensor& positions,
               const Tensor& keep, double p, DType precision, const Tensor& y)>
    EmbeddingForward;

// What the table's gradient is added to.
enum class EmbeddingSum : uint8_t {
  kMainGradient,  // grad + gathered.
  kTiedGradient,  // round(round(grad) + gathered): the output layer's gradient of the same microbatch, in the model dtype.
};

// Adds the embedding gradient to the rows of `grad` [V, h] F32 whose ids occur. Gathered as PyTorch's CUDA kernels do: up to 3072
// ids in chunks of 32 in [b, s] order, equal ids of a chunk summed in F32, one read-add-round per chunk; more ids in F32, rounded
// once. `touched` [V] I32 must be all -1 and is so again afterwards; `gathered` [b * s, h] F32 is scratch. ids [b, s], those
// below 0 are left out; dy [s, b, h].
extern Op<void(const Context&, const Tensor& ids, const Tensor& dy, DType precision, EmbeddingSum sum, const Tensor& grad,
               const Tensor& touched, const Tensor& gathered)>
    EmbeddingBackward;

}  // namespace mbridge
