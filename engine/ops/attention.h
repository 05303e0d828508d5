// Causal self-attention core: scores, softmax, dropout, context (megatron/core/transformer/dot_product_attention.py).
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// A learned score of each head that takes part in the softmax without a value (softmax_type = learnable, "attention sinks").
struct AttentionSinks {
  Tensor scores;         // [heads]; empty: none.
  Tensor probabilities;  // F32 [b, heads, s]: of the sink, kept for backward, which leaves its scores' gradients there.
  Tensor gradient;       // F32 [heads]: main gradient of `scores`, added to by backward (rounded first).
};

struct AttentionOptions {
  int64_t seq_length = 0;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t groups = 0;            // Key and value heads; heads is a multiple.
  int64_t head_size = 0;         // Of queries and keys.
  int64_t value_size = 0;        // Of values; 0: head_size.
  float scale = 1.0f;            // 1 / sqrt(head_size).
  float soft_cap = 0.0f;         // Scores are bent into (-soft_cap, soft_cap); 0: not.
  int64_t window = 0;            // Sliding window: a query sees this many keys up to its own; 0: all of them.
  double dropout = 0.0;          // Of the probabilities, by `keep`.
  bool softmax_in_fp32 = false;  // Probabilities stay F32 for the softmax's backward; else they are of `precision`.
  DType precision = DType::kF32;
  AttentionSinks sinks = {};

  int64_t value_width() const { return value_size > 0 ? value_size : head_size; }
};

// Type of the saved probabilities.
constexpr DType ProbabilityType(const AttentionOptions& options) {
  return options.softmax_in_fp32 ? DType::kF32 : options.precision;
}

// Bytes of scratch for either direction: with `threads` OpenMP threads on the CPU; on CUDA the scores of as many heads as make
// 256 MiB, twice (with a soft cap also in F32), and with grouped queries the key and value gradients of every head.
int64_t AttentionWorkspaceBytes(const AttentionOptions& options, DType storage, int threads,
                                DeviceType device = DeviceType::kCpu);

// qkv [s, b, QkvLayout::width()]: per group its queries, then key, then value. For each head:
//   S = round(U), U = scale Q K^T, with a soft cap S = round(cap tanh(U / cap)); masked above the diagonal and before the window;
//   P = softmax over keys in F32; D = round(round(P) keep scale of eager dropout); context = round(D V).
// keep [b, heads, s, s] U8, or empty for no dropout. probabilities [b, heads, s, s] of ProbabilityType gets P of the keys
// that are seen (elsewhere it is not written); empty: not kept. context [s, b, heads * value size]. workspace: U8 of
// AttentionWorkspaceBytes.
extern Op<void(const Context&, const Tensor& qkv, const Tensor& keep, const AttentionOptions& options,
               const Tensor& probabilities, const Tensor& context, const Tensor& workspace)>
    AttentionForward;

// d_qkv, laid out as qkv. dD = round(dC V^T), dP = round(dD keep scale), T = round(P dP), dS = round(T - P sum(T)) (F32 softmax:
// no rounding of T), with a soft cap dS = round(dS (1 - tanh(U / cap)^2)) with U from Q and K again; dQ = round(round(dS K)
// scale), dK = round(round(dS^T Q) scale), dV = round(D^T dC); keys and values sum the rounded gradients of their group's heads
// in F32 and round once more.
extern Op<void(const Context&, const Tensor& d_context, const Tensor& qkv, const Tensor& keep, const Tensor& probabilities,
               const AttentionOptions& options, const Tensor& d_qkv, const Tensor& workspace)>
    AttentionBackward;

}  // namespace mbridge
