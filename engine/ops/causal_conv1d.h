// The short convolution before a state-space mixer, each channel by itself over the tokens of its sequence, with SiLU
// (mamba_ssm's causal_conv1d).
#pragma once

#include "engine/ops/gemm.h"

namespace mbridge {

// y[t, b] = round(silu(u)), u = bias + sum over i < k of weight[., i] x[t - (k - 1) + i, b]; tokens before the first are 0.
// x, y [s * b, channels] as windows, row t * b + sequence; weight [channels, 1, k] or [channels, k], k at most
// kMostConvolutionTaps; bias [channels] or empty. x is rounded on read. y must not overlap x.
inline constexpr int64_t kMostConvolutionTaps = 64;
extern Op<void(const Context&, const Matrix& x, const Tensor& weight, const Tensor& bias, int64_t batch, DType precision,
               const Matrix& y)>
    CausalConv1dForward;

// dx, and the rounded sums over all tokens added to weight_grad and bias_grad (F32; bias_grad empty without bias). dx must not
// overlap x or dy.
extern Op<void(const Context&, const Matrix& dy, const Matrix& x, const Tensor& weight, const Tensor& bias, int64_t batch,
               DType precision, const Matrix& dx, const Tensor& weight_grad, const Tensor& bias_grad)>
    CausalConv1dBackward;

}  // namespace mbridge
