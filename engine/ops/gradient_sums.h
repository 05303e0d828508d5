// How gradients of one microbatch join the fp32 main gradients: rounded to the model dtype first, then added, as PyTorch's
// autograd followed by Megatron-LM's `main_grad.add_(grad)` does.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// main_grad += round(grad). grad F32 or storage of `precision`; main_grad F32, as many elements.
extern Op<void(const Context&, const Tensor& grad, DType precision, const Tensor& main_grad)> AddGradient;

// main_grad[j] += round(sum over rows of round(x[i, j])); F32 sums. x [rows, n] F32 or storage of `precision`,
// main_grad [n] F32.
extern Op<void(const Context&, const Tensor& x, DType precision, const Tensor& main_grad)> AddColumnSums;

}  // namespace mbridge
