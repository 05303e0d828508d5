// A linear layer y = x W^T; its bias, if any, is added by the operation that follows.
#pragma once

#include <string>

#include "engine/model/step.h"
#include "engine/model/weights.h"

namespace mbridge {

struct Linear {
  int weight = -1;  // Index of [out, in].
  int bias = -1;    // Index of [out], -1 without.

  // y [rows, out]: unrounded if storage is F32.
  void Forward(const Step& step, const Weights& weights, const Tensor& x, const Tensor& y) const;
  // dx = dy W, unrounded if storage is F32; adds round(dy^T x) to the weight's main gradient. `scratch` F32, at least out * in.
  void Backward(const Step& step, const Weights& weights, const Tensor& dy, const Tensor& x, const Tensor& dx,
                const Tensor& scratch) const;
};

}  // namespace mbridge
