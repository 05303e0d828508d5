// Which attention a layer runs: scores kept in memory with Megatron-LM's roundings (engine/ops/attention.h), or on a GPU, where
// nothing forbids it, flash attention (engine/ops/flash_attention.h).
#pragma once

#include "engine/core/arena.h"
#include "engine/model/step.h"
#include "engine/ops/attention.h"

namespace mbridge {

// What the backward pass needs of a layer's attention, beside its input and output. One of the first two is empty.
struct CoreAttentionRecord {
  Tensor probabilities;  // [b, heads, s, s] of ProbabilityType.
  Tensor stats;          // F32 [b, heads, s]: flash attention's.

  static CoreAttentionRecord Allocate(Arena* arena, const Step& step, const AttentionOptions& options);
};

// On a GPU, for BF16 and F16, without dropout of probabilities, soft cap and fp32 softmax, where cuDNN has the shape; sinks are
// added to its result.
bool UsesFlashAttention(const Step& step, const AttentionOptions& options);

// U8 of this many bytes for either direction.
int64_t CoreAttentionWorkspaceBytes(const Step& step, const AttentionOptions& options, int threads);

// Makes cuDNN's plans for a layer, which takes up to seconds.
void PrepareCoreAttention(const Step& step, const AttentionOptions& options);

void CoreAttentionForward(const Step& step, const AttentionOptions& options, const Tensor& qkv, const Tensor& keep,
                          const CoreAttentionRecord& record, const Tensor& context, const Tensor& workspace);

void CoreAttentionBackward(const Step& step, const AttentionOptions& options, const Tensor& d_context, const Tensor& qkv,
                           const Tensor& keep, const Tensor& context, const CoreAttentionRecord& record, const Tensor& d_qkv,
                           const Tensor& workspace);

}  // namespace mbridge
