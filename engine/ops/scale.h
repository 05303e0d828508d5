// Multiplication of a tensor by a constant.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// y = round(round(x) * factor), as many elements; y may be x. Also its own backward.
extern Op<void(const Context&, const Tensor& x, float factor, DType precision, const Tensor& y)> Scale;

}  // namespace mbridge
