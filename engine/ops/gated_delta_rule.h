// The gated delta rule: linear attention whose state is corrected by what it already holds for a key
// (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10).
//
// With unit keys k = k'/|k'| and queries q = q'/(|q'| sqrt(key_size)), |x|^2 = sum x^2 + 1e-6, the state S [key_size, value_size]
// of a value head starts at 0 and takes token after token:
//   S = exp(g) S;  S = S + k beta (v - S^T k)^T;  o = S^T q.
// All in F32; inputs are rounded on read, outputs once.
#pragma once

#include <cstdint>

#include "engine/core/dtype.h"
#include "engine/core/op.h"

namespace mbridge {

// A token's row: the queries of all key heads, their keys, the values of all value heads. Neighbouring value heads share a key
// head.
struct DeltaLayout {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // A multiple of key_heads.
  int64_t key_size = 0;
  int64_t value_size = 0;

  int64_t key_width() const { return key_heads * key_size; }
  int64_t value_width() const { return value_heads * value_size; }
  int64_t width() const { return 2 * key_width() + value_width(); }
  int64_t query_column(int64_t key_head) const { return key_head * key_size; }
  int64_t key_column(int64_t key_head) const { return key_width() + key_head * key_size; }
  int64_t value_column(int64_t value_head) const { return 2 * key_width() + value_head * value_size; }
  int64_t values_per_key() const { return value_heads / key_heads; }
};

// Tokens between kept states.
inline constexpr int64_t kDeltaChunk = 64;
// Kept states of a sequence: F32 [batch, value_heads, DeltaChunks(s), key_size, value_size].
inline int64_t DeltaChunks(int64_t seq_length) { return (seq_length + kDeltaChunk - 1) / kDeltaChunk; }

// output [s, b, value_width()] from qkv [s, b, width()], log_decay (g) and beta F32 [s, b, value_heads]. states: those before
// each chunk, for backward; empty: not kept.
extern Op<void(const Context&, const Tensor& qkv, const Tensor& log_decay, const Tensor& beta, const DeltaLayout& layout,
               DType precision, const Tensor& output, const Tensor& states)>
    GatedDeltaRuleForward;

// d_qkv [s, b, width()], d_log_decay and d_beta F32 [s, b, value_heads] from d_output.
extern Op<void(const Context&, const Tensor& d_output, const Tensor& qkv, const Tensor& log_decay, const Tensor& beta,
               const Tensor& states, const DeltaLayout& layout, DType precision, const Tensor& d_qkv, const Tensor& d_log_decay,
               const Tensor& d_beta)>
    GatedDeltaRuleBackward;

// log_decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b), F32 [s, b, heads], from the columns [column, column + heads)
// (b) and the next `heads` (a) of projected [s, b, ...]; a_log, dt_bias [heads] of its storage.
extern Op<void(const Context&, const Tensor& projected, int64_t column, const Tensor& a_log, const Tensor& dt_bias,
               DType precision, const Tensor& log_decay, const Tensor& beta)>
    DeltaGatesForward;

// Writes the columns of d_projected that forward read; the F32 [heads] gradients of a_log and dt_bias get their sums added.
extern Op<void(const Context&, const Tensor& d_log_decay, const Tensor& d_beta, const Tensor& projected, int64_t column,
               const Tensor& a_log, const Tensor& dt_bias, DType precision, const Tensor& d_projected, const Tensor& a_log_grad,
               const Tensor& dt_bias_grad)>
    DeltaGatesBackward;

}  // namespace mbridge
