// Matrix products of many experts at once: rows [offsets[e], offsets[e + 1]) belong to expert e. An expert may have no rows.
// On CUDA the experts' tensors stand equally far apart in memory, and the counts of rows are never read by the host.
#pragma once

#include <span>

#include "engine/core/op.h"

namespace mbridge {

// y = x W_e^T for each row: x [R, in], weights E tensors [out, in] of x's type, offsets I32 [E + 1], y [R, out]: sums in F32, one
// rounding to y's type (Gemm's rules).
extern Op<void(const Context&, const Tensor& x, std::span<const Tensor> weights, const Tensor& offsets, const Tensor& y)>
    GroupedGemm;

// dx = dy W_e for each row.
extern Op<void(const Context&, const Tensor& dy, std::span<const Tensor> weights, const Tensor& offsets, const Tensor& dx)>
    GroupedGemmInputGradient;

// main_grads[e] += round(dy_e^T x_e), F32 [out, in]. scratch F32, at least out * in; not used on CUDA.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& offsets, DType precision,
               std::span<const Tensor> main_grads, const Tensor& scratch)>
    GroupedGemmWeightGradient;

}  // namespace mbridge
