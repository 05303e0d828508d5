// The end of the model: output layer and cross entropy, forward and backward in tiles of the vocabulary. Logits are kept in the
// model dtype for one block of tokens only. Tensor-parallel ranks have a part of the vocabulary each
// (megatron/core/tensor_parallel/cross_entropy.py).
#pragma once

#include "engine/core/arena.h"
#include "engine/model/step.h"
#include "engine/ops/logit_transform.h"
#include "engine/ops/vocab_cross_entropy.h"

namespace mbridge {

// What the config does to logits.
LogitTransform LogitTransformOf(const GptConfig& config);

struct OutputHeadScratch {
  CrossEntropyState state;  // [block].
  Tensor largest;           // F32 [block]: maximum over the ranks, with several.
  Tensor tile;              // [block, tile columns and padding], storage.
  Tensor logits;            // [block, V], model dtype; V is this rank's part of the vocabulary.
  Tensor input_grad;        // [tokens, h]: F32, on a GPU storage.
  Tensor weight_grad;       // F32 [V, h]; empty with fused gradients.
  Tensor labels;            // I32 [tokens], sequence-first, counted from this rank's first word.
  Tensor weight;            // F32 [tokens]: gradient of the objective for each token's loss.
  Tensor loss;              // F32 [tokens].

  static OutputHeadScratch Allocate(Arena* arena, const Step& step);
};

// scratch.loss, equal on all ranks, from hidden [s, b, h], scratch.labels and table [V, h]. In training also scratch.input_grad
// (of this rank's words) and the table's gradient (both unrounded), from scratch.weight. `table_grad` F32 [V, h]: with fused
// gradients the main gradient, which is added to; else scratch.weight_grad, which is overwritten.
void OutputHeadRun(const Step& step, const Tensor& hidden, const Tensor& table, const Tensor& table_grad,
                   const OutputHeadScratch& scratch);

}  // namespace mbridge
