// What the norms of this folder share.
#pragma once

#include "engine/core/dtype.h"

namespace mbridge {

struct NormOptions {
  float epsilon = 1e-5f;
  float gamma_offset = 0.0f;      // Added to gamma, in F32: 1 for weights that are stored minus one.
  DType precision = DType::kF32;  // layer_norm.h says what it is.
};

}  // namespace mbridge
