// Bias of a linear layer that rounds twice: once after the product, once after the addition.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// x = round(round(x) + bias), in place. x [rows, n], bias [n].
extern Op<void(const Context&, const Tensor& x, const Tensor& bias, DType precision)> BiasAdd;

}  // namespace mbridge
