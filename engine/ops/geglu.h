// Gated activation of the first MLP layer, with its bias: GELU of the first half times the second half.
#pragma once

#include "engine/core/op.h"
#include "engine/ops/bias_gelu.h"

namespace mbridge {

// x [rows, 2 n] with the gates in the first n columns; bias [2 n] or empty (then u = x); y [rows, n]. The fused kinds round once,
// at the end (megatron/core/fusions/fused_bias_geglu.py, compiled); the others are separate PyTorch operations:
//   fused: y = round(gelu(x1 + bias) (x2 + bias));  else: u = round(x + bias), y = round(round(gelu(u1)) u2).
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y)>
    GegluForward;

// dx [rows, 2 n] from dy [rows, n]:
//   fused: dx1 = round(dy u2 gelu'(u1)), dx2 = round(dy gelu(u1));
//   else:  dx1 = round(round(dy u2) gelu'(u1)), dx2 = round(dy round(gelu(u1))).
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
               const Tensor& dx)>
    GegluBackward;

}  // namespace mbridge
