// Root-mean-square normalisation over the last dimension (torch.nn.RMSNorm): no mean, no bias. layer_norm.h says what precision
// and storage are.
#pragma once

#include "engine/core/op.h"
#include "engine/ops/norm_options.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge {

// y = x * rstd * g with g = gamma + gamma_offset, one rounding; rstd = 1 / sqrt(mean(x^2) + epsilon). x, y [rows, h]; gamma [h];
// rstd [rows] F32, kept for backward.
extern Op<void(const Context&, const Tensor& x, const Tensor& gamma, const NormOptions& options, const Tensor& y,
               const Tensor& rstd)>
    RmsNormForward;

// hidden = round(residual + x) and RmsNormForward of it. x, residual, hidden, y [rows, h]; hidden may be x or residual.
extern Op<void(const Context&, const Tensor& x, const Tensor& residual, const Tensor& gamma, const NormOptions& options,
               const Tensor& hidden, const Tensor& y, const Tensor& rstd)>
    AddRmsNormForward;

// dx = round(d_residual + round(r (t - n mean(t n)))) with t = dy g, n = x r; without d_residual (empty) the inner rounding
// alone. dx may be dy or d_residual. gamma_grad [h] F32 gets the rounded sum of dy n over rows added.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& rstd,
               const Tensor& d_residual, const NormOptions& options, const Tensor& dx, const Tensor& gamma_grad)>
    RmsNormBackward;

// What one query-key norm spans.
enum class QkNormScope : uint8_t {
  kHead,        // Each head by itself: one gamma [head_size] for all queries and one for all keys; rstd [rows, heads + groups].
  kProjection,  // A token's queries together and its keys together: gammas [heads * head_size] and [groups * head_size] in the
                // order of the heads; rstd [rows, 2], queries first.
};

struct QkNormOptions {
  QkvLayout layout;
  QkNormScope scope = QkNormScope::kHead;
  NormOptions norm;
  // A projection split over `ranks` of which this one has `layout`: F32 [rows, 2], queries first, the sums over all of them of
  // QkNormSquares or QkNormDots. Empty: the projection is whole.
  Tensor sums = {};
  int64_t ranks = 1;
};

// For kProjection: sums [rows, 2] F32 of the squares of a token's queries, and of its keys.
extern Op<void(const Context&, const Tensor& qkv, const QkNormOptions& options, const Tensor& sums)> QkNormSquares;

// For kProjection: sums [rows, 2] F32 of t n (as in RmsNormBackward) over a token's queries, and over its keys.
extern Op<void(const Context&, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
               const Tensor& rstd, const QkNormOptions& options, const Tensor& sums)>
    QkNormDots;

// Query-key normalisation of qkv [rows, layout.width()] as RmsNormForward does it; values are copied. rstd F32. y must not be
// qkv. On CUDA, here and in the operators around, values are as wide as queries.
extern Op<void(const Context&, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
               const QkNormOptions& options, const Tensor& y, const Tensor& rstd)>
    QkNormForward;

// `gradient`: of y on entry, of qkv on return. The gammas' gradients get their rounded sums (over rows, and over heads where
// they share the gamma) added.
extern Op<void(const Context&, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
               const Tensor& rstd, const QkNormOptions& options, const Tensor& query_gamma_grad, const Tensor& key_gamma_grad)>
    QkNormBackward;

}  // namespace mbridge
