// Root-mean-square normalisation over the last dimension (torch.nn.RMSNorm): no mean, no bias. layer_norm.h says what precision
// and storage are.
#pragma once

#include "engine/core/op.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge {

// y = x * rstd * gamma, one rounding; rstd = 1 / sqrt(mean(x^2) + epsilon). x, y [rows, h]; gamma [h]; rstd [rows] F32, kept for
// backward.
extern Op<void(const Context&, const Tensor& x, const Tensor& gamma, float epsilon, DType precision, const Tensor& y,
               const Tensor& rstd)>
    RmsNormForward;

// dx = round(d_residual + round(r (t - n mean(t n)))) with t = dy gamma, n = x r; without d_residual (empty) the inner rounding
// alone. dx may be dy or d_residual. gamma_grad [h] F32 gets the rounded sum of dy n over rows added.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& rstd,
               const Tensor& d_residual, DType precision, const Tensor& dx, const Tensor& gamma_grad)>
    RmsNormBackward;

// Query-key normalisation: each query and key head of qkv [rows, layout.width()] is normalised by itself, with one gamma
// [head_size] for queries and one for keys; values are copied. rstd [rows, heads + groups] F32. y must not be qkv.
extern Op<void(const Context&, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma, const QkvLayout& layout,
               float epsilon, DType precision, const Tensor& y, const Tensor& rstd)>
    QkNormForward;

// `gradient`: of y on entry, of qkv on return. The gammas' gradients get their rounded sums over rows and heads added.
extern Op<void(const Context&, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
               const Tensor& rstd, const QkvLayout& layout, DType precision, const Tensor& query_gamma_grad,
               const Tensor& key_gamma_grad)>
    QkNormBackward;

}  // namespace mbridge
