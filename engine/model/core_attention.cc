#include "engine/model/core_attention.h"

#include "engine/ops/attention_sinks.h"
#include "engine/ops/flash_attention.h"

namespace mbridge {
namespace {

FlashAttentionOptions FlashOptionsOf(const Step& step, const AttentionOptions& o) {
  return {.seq_length = o.seq_length,
          .batch = o.batch,
          .heads = o.heads,
          .groups = o.groups,
          .head_size = o.head_size,
          .scale = o.scale,
          .window = o.window,
          .deterministic = step.config->deterministic,
          .value_size = o.value_size};
}

}  // namespace

bool UsesFlashAttention(const Step& step, const AttentionOptions& options) {
  if (step.context.device != DeviceType::kCuda || step.storage == DType::kF32) return false;
  if (options.dropout > 0 || options.softmax_in_fp32 || options.soft_cap > 0) return false;
  return FlashAttentionRefusal(FlashOptionsOf(step, options), step.storage).empty();
}

CoreAttentionRecord CoreAttentionRecord::Allocate(Arena* arena, const Step& step, const AttentionOptions& options) {
  const int64_t s = options.seq_length;
  CoreAttentionRecord record;
  if (UsesFlashAttention(step, options)) {
    record.stats = arena->Allocate(DType::kF32, {options.batch, options.heads, s});
  } else {
    record.probabilities = arena->Allocate(ProbabilityType(options), {options.batch, options.heads, s, s});
  }
  return record;
}

int64_t CoreAttentionWorkspaceBytes(const Step& step, const AttentionOptions& options, int threads) {
  if (UsesFlashAttention(step, options)) return FlashAttentionWorkspaceBytes(FlashOptionsOf(step, options));
  return AttentionWorkspaceBytes(options, step.storage, threads, step.context.device);
}

void PrepareCoreAttention(const Step& step, const AttentionOptions& options) {
  if (UsesFlashAttention(step, options)) PrepareFlashAttention(step.context, FlashOptionsOf(step, options), step.storage);
}

void CoreAttentionForward(const Step& step, const AttentionOptions& options, const Tensor& qkv, const Tensor& keep,
                          const CoreAttentionRecord& record, const Tensor& context, const Tensor& workspace) {
  if (!record.stats.empty()) {
    FlashAttentionForward(step.context, qkv, FlashOptionsOf(step, options), record.stats, context, workspace);
    if (!options.sinks.scores.empty()) AddSinksToFlash(step.context, options.sinks, record.stats, context);
  } else {
    AttentionForward(step.context, qkv, keep, options, step.training() ? record.probabilities : Tensor(), context, workspace);
  }
}

void CoreAttentionBackward(const Step& step, const AttentionOptions& options, const Tensor& d_context, const Tensor& qkv,
                           const Tensor& keep, const Tensor& context, const CoreAttentionRecord& record, const Tensor& d_qkv,
                           const Tensor& workspace) {
  if (!record.stats.empty()) {
    FlashAttentionBackward(step.context, d_context, qkv, context, record.stats, FlashOptionsOf(step, options), d_qkv, workspace);
    if (!options.sinks.scores.empty()) FlashSinkGradients(step.context, d_context, context, step.precision, options.sinks);
  } else {
    AttentionBackward(step.context, d_context, qkv, keep, record.probabilities, options, d_qkv, workspace);
  }
}

}  // namespace mbridge
