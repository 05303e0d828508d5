// Gated activation of the first MLP layer, with its bias: silu of the first half times the second half.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

enum class SwiGluKind : uint8_t {
  kFused,  // u = x + bias unrounded, one rounding at the end (megatron/core/fusions/fused_bias_swiglu.py, compiled).
  kEager,  // u = round(x + bias), round(silu), round(product), as separate PyTorch operations.
};

// x [rows, 2 n] with the gates in the first n columns; bias [2 n] or empty (then u = x); y [rows, n].
//   fused: y = round(u1 sigmoid(u1) u2);  eager: y = round(round(u1 sigmoid(u1)) u2).
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision, const Tensor& y)>
    SwiGluForward;

// dx [rows, 2 n] from dy [rows, n]; with s = sigmoid(u1):
//   fused: dx1 = round(dy s (1 + u1 (1 - s)) u2), dx2 = round(dy u1 s);
//   eager: dx1 = round(round(dy u2) s (1 + u1 (1 - s))), dx2 = round(dy round(u1 s)).
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
               const Tensor& dx)>
    SwiGluBackward;

// The same, and amax [1] F32 = max(amax, largest |y| or |dx|), NaN passed over: what an 8-bit copy of the result wants to know.
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision, const Tensor& y,
               const Tensor& amax)>
    SwiGluForwardWithAmax;
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
               const Tensor& dx, const Tensor& amax)>
    SwiGluBackwardWithAmax;

}  // namespace mbridge
