// RMSNorm with a gate, as state-space mixers end (mamba_ssm's RMSNormGated). layer_norm.h says what precision and storage are.
#pragma once

#include "engine/ops/gemm.h"
#include "engine/ops/norm_options.h"

namespace mbridge {

struct GatedRmsNormOptions {
  int64_t groups = 1;             // Parts of a row that are normalised by themselves.
  bool norm_before_gate = false;  // norm(x) silu(z) instead of norm(x silu(z)).
  NormOptions norm;
};

// y = norm(x silu(z)) or norm(x) silu(z), one rounding. x, y [rows, n]; z a window [rows, n]; gamma [n], or [n / groups] for all
// groups, or empty: no norm, y = round(x silu(z)). rstd F32 [rows, groups], kept for backward; empty without gamma. x and z are
// rounded on read.
extern Op<void(const Context&, const Tensor& x, const Matrix& z, const Tensor& gamma, const GatedRmsNormOptions& options,
               const Tensor& y, const Tensor& rstd)>
    GatedRmsNormForward;

// dx and dz, each rounded once; gamma_grad (F32) gets the rounded sum added. dx may be dy.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Matrix& z, const Tensor& gamma, const Tensor& rstd,
               const GatedRmsNormOptions& options, const Tensor& dx, const Matrix& dz, const Tensor& gamma_grad)>
    GatedRmsNormBackward;

}  // namespace mbridge
