// Dropout by a keep mask (torch_random.h makes the masks), and the fused bias + dropout + residual addition.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

enum class DropoutKind : uint8_t {
  kEager,     // torch.nn.Dropout and separate operations: each step rounds; scale 1 / float(1 - p).
  kCompiled,  // One compiled function: F32 inside, one rounding; scale float(1 / (1 - p)).
};

// What kept values are multiplied by.
float DropoutScale(DropoutKind kind, double p);

// y = round(x * keep * scale) of the eager kind; also its backward. y may be x. `keep` U8, as many elements as x.
extern Op<void(const Context&, const Tensor& x, const Tensor& keep, double p, DType precision, const Tensor& y)> Dropout;

// y = residual + dropout(x + bias) (megatron/core/fusions/fused_bias_dropout.py):
//   compiled: round(residual + (x + bias) keep scale);  eager: round(residual + round(round(x + bias) keep scale)).
// x, residual, y [rows, n]; bias [n] or empty; keep [rows, n] U8, or empty for no dropout. y may be residual.
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& keep, double p,
               DropoutKind kind, DType precision, const Tensor& y)>
    BiasDropoutAddForward;

// dx = round(dy keep scale); the residual's gradient is dy itself. bias_grad [n] F32 (or empty) gets the rounded column sums
// added: of the unrounded products if compiled, of dx if eager.
extern Op<void(const Context&, const Tensor& dy, const Tensor& keep, double p, DropoutKind kind, DType precision,
               const Tensor& dx, const Tensor& bias_grad)>
    BiasDropoutAddBackward;

}  // namespace mbridge
