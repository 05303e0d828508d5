// Attention sinks around flash attention, which knows none: a sink with score z only divides each row's probabilities by
// 1 + exp(z) / sum(exp(scores)), so the forward pass scales what came out, and with the row's new normaliser the backward pass
// needs no change. CUDA only, as flash attention; AttentionForward.cpu is the reference.
#pragma once

#include "engine/ops/attention.h"

namespace mbridge {

// After FlashAttentionForward: context [s, b, heads * value size] and stats [b, heads, s] F32 as if each row's softmax had had
// the sink too; sinks.probabilities gets the sink's.
extern Op<void(const Context&, const AttentionSinks& sinks, const Tensor& stats, const Tensor& context)> AddSinksToFlash;

// sinks.gradient [heads] += round(-sum over samples and rows of probability (d_context . context)), from what the former left.
// sinks.probabilities is overwritten.
extern Op<void(const Context&, const Tensor& d_context, const Tensor& context, DType precision, const AttentionSinks& sinks)>
    FlashSinkGradients;

}  // namespace mbridge
