// Where packed sequences stand, as cuDNN is told: for each of its samples (a sequence, or with grouped queries a sequence and a
// group) a length and its first element in qkv, context and stats.
#pragma once

#include "engine/ops/flash_attention.h"

namespace mbridge::cuda {

// Offsets in bytes of the four I32 arrays of [parts + 1].
struct FlashPacking {
  explicit FlashPacking(const FlashAttentionOptions& options) : stride(4 * (FlashPackedParts(options) + 1)) {}
  int64_t stride;
  int64_t lengths() const { return 0; }
  int64_t qkv() const { return stride; }
  int64_t context() const { return 2 * stride; }
  int64_t stats() const { return 3 * stride; }
};

// Fills the arrays at `memory`, of FlashPackingBytes, from options.cu_seqlens.
void FillFlashPacking(const Context& context, const FlashAttentionOptions& options, void* memory);

}  // namespace mbridge::cuda
