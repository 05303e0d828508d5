// Causal self-attention that never stores scores: CUDA only, through cuDNN. AttentionForward.cpu (attention.h) is its reference:
// the same function without the roundings of scores and with none of its saved probabilities, so there is no CPU twin.
#pragma once

#include <string>

#include "engine/core/op.h"

namespace mbridge {

struct FlashAttentionOptions {
  int64_t seq_length = 0;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t groups = 0;     // Key and value heads; heads is a multiple.
  int64_t head_size = 0;  // Of queries and keys.
  float scale = 1.0f;
  int64_t window = 0;          // A query sees this many keys up to its own; 0: all of them.
  bool deterministic = false;  // Backward: the same bits in every run, for batch * heads * seq_length^2 * 2 bytes of workspace.
  int64_t value_size = 0;      // Of values and of the context; 0: head_size.
  // Packed sequences: at most this many in one sample, each of which sees itself alone; 0: samples are sequences. `cu_seqlens`
  // I32 [batch, sequences + 1] is then given to both directions, for each sample ascending from 0 to seq_length: sequence i
  // stands at tokens [cu_seqlens[i], cu_seqlens[i + 1]), those beyond the last are empty. No model packs sequences yet.
  int64_t sequences = 0;
  Tensor cu_seqlens = {};
  // Dropout of the probabilities by cuDNN's own generator, from `random` I64 [2]: seed and offset, the same in both directions.
  double dropout = 0.0;
  Tensor random = {};

  int64_t value_width() const { return value_size > 0 ? value_size : head_size; }
};

// Why these options cannot be computed on a GPU by this program; empty if they can. Needs no GPU; cuDNN may still refuse when it
// makes a plan, which PrepareFlashAttention finds out at the start.
std::string FlashAttentionRefusal(const FlashAttentionOptions& options, DType dtype);

// Bytes of workspace that either direction takes at most; needs no GPU.
int64_t FlashAttentionWorkspaceBytes(const FlashAttentionOptions& options);

// Of packed sequences: cuDNN's samples, and the part of the workspace, at its beginning, that says where they stand.
int64_t FlashPackedParts(const FlashAttentionOptions& options);
int64_t FlashPackingBytes(const FlashAttentionOptions& options);

// Makes the plans of both directions, which takes cuDNN up to seconds each; else the first call of a direction does. Plans are
// kept for the life of the process. Throws EngineError with cuDNN's words where it has none.
extern Op<void(const Context&, const FlashAttentionOptions&, DType)> PrepareFlashAttention;

// context [s, b, heads * value size] = dropout(softmax(scale Q K^T, masked above the diagonal and before the window)) V, of qkv
// [s, b, QkvLayout::width()] as AttentionForward; BF16 or F16, sums and softmax in F32, probabilities rounded to the type. stats
// [b, heads, s] F32 (with packed sequences [s, b, heads]) gets log(sum(exp(scale Q K^T))) of each row. workspace: U8 of
// FlashAttentionWorkspaceBytes.
extern Op<void(const Context&, const Tensor& qkv, const FlashAttentionOptions&, const Tensor& stats, const Tensor& context,
               const Tensor& workspace)>
    FlashAttentionForward;

// d_qkv, laid out as qkv, from the forward's qkv, context and stats.
extern Op<void(const Context&, const Tensor& d_context, const Tensor& qkv, const Tensor& context, const Tensor& stats,
               const FlashAttentionOptions&, const Tensor& d_qkv, const Tensor& workspace)>
    FlashAttentionBackward;

// What the CUDA code says about itself: empty, or why it cannot. Set when it is linked in.
extern std::string (*g_flash_attention_backend)();

}  // namespace mbridge
