// Conversion between storage types, and rounding in place.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// to = round(from) to `precision`, as many elements; F32, BF16 and F16 storage. `to` may be `from` if their dtypes are equal.
extern Op<void(const Context&, const Tensor& from, DType precision, const Tensor& to)> Convert;

}  // namespace mbridge
