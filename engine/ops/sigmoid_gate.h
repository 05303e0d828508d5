// y = x sigmoid(gate): what an attention layer with an output gate lets through.
#pragma once

#include "engine/core/dtype.h"
#include "engine/core/op.h"

namespace mbridge {

// All of one shape. The sigmoid and the product are rounded, as separate PyTorch operations do. y may be x.
extern Op<void(const Context&, const Tensor& x, const Tensor& gate, DType precision, const Tensor& y)> SigmoidGateForward;

// dx may be dy, d_gate may be gate.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& gate, DType precision, const Tensor& dx,
               const Tensor& d_gate)>
    SigmoidGateBackward;

}  // namespace mbridge
