// Layer normalisation over the last dimension (torch.nn.functional.layer_norm).
//
// "Precision" in this folder: the model dtype whose rounding applies to every stored result. Storage is the tensors' dtype: the
// precision itself, or F32 that holds values of it (see cpu/precision.h). Inputs of F32 storage are rounded on read.
#pragma once

#include "engine/core/op.h"
#include "engine/ops/norm_options.h"

namespace mbridge {

// y = (x - mean) * rstd * (gamma + gamma_offset) + beta, one rounding; rstd = 1 / sqrt(biased variance + epsilon). x, y [rows,
// h]; gamma, beta [h]; mean, rstd [rows] F32, kept for backward.
extern Op<void(const Context&, const Tensor& x, const Tensor& gamma, const Tensor& beta, const NormOptions& options,
               const Tensor& y, const Tensor& mean, const Tensor& rstd)>
    LayerNormForward;

// dx = round(d_residual + round(layer norm's input gradient)); without d_residual (empty) the latter alone. dx may be dy or
// d_residual. gamma_grad and beta_grad [h] F32: each gets its sum over rows, rounded to `precision`, added.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean, const Tensor& rstd,
               const Tensor& d_residual, const NormOptions& options, const Tensor& dx, const Tensor& gamma_grad,
               const Tensor& beta_grad)>
    LayerNormBackward;

}  // namespace mbridge
