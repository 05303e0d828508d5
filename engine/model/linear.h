// A linear layer y = x W^T; its bias, if any, is added by the operation that follows. Split over the tensor-parallel ranks by
// columns (each rank makes some of y's features) or rows (each rank has some of x's features and y is summed over the ranks).
#pragma once

#include <cstdint>

#include "engine/model/narrow_linears.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"

namespace mbridge {

enum class LinearSplit : uint8_t { kNone, kColumns, kRows };

// What lies between blocks (x of a column-split layer, y of a row-split one) is the residual stream [stream length, b, ...], all
// else [s, b, ...].
struct Linear {
  int weight = -1;  // Index of [out, in], of this rank.
  int bias = -1;    // Index of [out], -1 without.
  LinearSplit split = LinearSplit::kNone;
  int narrow = -1;  // Its index in step.narrow, -1: products of the model dtype.

  // y [rows, out]: unrounded if storage is F32. `kept`: of step.narrow, for a layer that is there.
  void Forward(const Step& step, const Weights& weights, const Tensor& x, const Tensor& y, const NarrowInput& kept = {}) const;
  // dx = dy W, unrounded if storage is F32, summed over the ranks if columns are split; adds round(dy^T x) to the weight's main
  // gradient. `scratch` F32,
  // at least out * in, is not used with fused gradients. `x` is not read if `kept` has its codes.
  void Backward(const Step& step, const Weights& weights, const Tensor& dy, const Tensor& x, const Tensor& dx,
                const Tensor& scratch, const NarrowInput& kept = {}) const;
};

}  // namespace mbridge
