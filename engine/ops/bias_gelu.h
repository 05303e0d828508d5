// GELU of the first MLP layer, with its bias.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

enum class GeluKind : uint8_t {
  kTanhFused,  // u = x + bias unrounded; tanh approximation (megatron/core/fusions/fused_bias_gelu.py, compiled: one rounding).
  kTanh,       // u = round(x + bias); tanh approximation of u (torch.nn.functional.gelu, approximate="tanh").
  kErf,        // u = round(x + bias); exact GELU of u (torch.nn.functional.gelu).
  kErfFused,   // u = x + bias unrounded; exact GELU.
};

// y = round(gelu(u)). x, y [rows, n], bias [n] or empty (then u = x).
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y)>
    BiasGeluForward;

// dx = round(gelu'(u) dy); dx may be dy.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
               const Tensor& dx)>
    BiasGeluBackward;

}  // namespace mbridge
