// Squared ReLU of the first MLP layer, with its bias (megatron/core/activations.py, squared_relu).
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// y = round(max(u, 0)^2) with u = round(x + bias). x, y [rows, n], bias [n] or empty (then u = x).
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, DType precision, const Tensor& y)> SquaredReluForward;

// dx = round(2 max(u, 0) dy); dx may be dy.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, DType precision, const Tensor& dx)>
    SquaredReluBackward;

}  // namespace mbridge
