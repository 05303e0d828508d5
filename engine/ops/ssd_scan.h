// The selective scan of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024; mamba_ssm's mamba_chunk_scan_combined). Each head has
// a state h [head_dim, state_dim] that runs over the tokens of a sequence:
//   delta = softplus(dt + dt_bias), bounded;  a = exp(-exp(A_log) delta)
//   h_t = a h_(t-1) + delta x_t B_t^T;  y_t = h_t C_t + D x_t
// Heads of a group share B and C.
#pragma once

#include "engine/ops/gemm.h"

namespace mbridge {

struct SsdScanOptions {
  int64_t batch = 0;
  int64_t heads = 0, head_dim = 0;
  int64_t groups = 0, state_dim = 0;
  float dt_min = 0.0f, dt_max = 0.0f;  // Bounds of delta; 0: none.
  DType precision = DType::kF32;

  int64_t inner_width() const { return heads * head_dim; }
  int64_t width() const { return inner_width() + 2 * groups * state_dim; }  // Of x, B and C.
};

struct SsdScanInputs {
  Matrix xbc;                // [s * b, width()]: x head by head, B group by group, C group by group.
  Matrix dt;                 // [s * b, heads].
  Tensor a_log, d, dt_bias;  // [heads].
};

// F32, each [heads].
struct SsdScanGradients {
  Tensor a_log, d, dt_bias;
};

// Scratch of either direction, U8. CPU: `threads` as OpenMP has them.
int64_t SsdScanWorkspaceBytes(const SsdScanOptions& options, int64_t seq_length, int threads);

// y [s * b, inner_width()], states and sums in F32, one rounding. Inputs are rounded on read. Row t * b + sequence.
extern Op<void(const Context&, const SsdScanInputs& inputs, const SsdScanOptions& options, const Tensor& y,
               const Tensor& workspace)>
    SsdScanForward;

// d_xbc and d_dt like xbc and dt, overlapping no input; the rounded sums over tokens join `gradients`. Where a
// bound holds delta, dt gets no gradient. States are computed again: forward keeps none.
extern Op<void(const Context&, const Tensor& dy, const SsdScanInputs& inputs, const SsdScanOptions& options, const Matrix& d_xbc,
               const Matrix& d_dt, const SsdScanGradients& gradients, const Tensor& workspace)>
    SsdScanBackward;

}  // namespace mbridge
