// What the norms of this folder share.
#pragma once

#include "engine/core/tensor.h"

namespace mbridge {

struct NormOptions {
  float epsilon = 1e-5f;
  float gamma_offset = 0.0f;      // Added to gamma, in F32: 1 for weights that are stored minus one.
  DType precision = DType::kF32;  // layer_norm.h says what it is.
  Tensor amax = {};               // F32 [1] or empty: raised to the largest |y|, in backward |dx|, of LayerNorm and RmsNorm.
};

}  // namespace mbridge
