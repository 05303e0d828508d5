// What stands between the output layer and the loss: a scale and a soft cap of the logits.
#pragma once

#include "engine/core/op.h"
#include "engine/ops/gemm.h"

namespace mbridge {

// T(x) = scale x without a soft cap, else soft_cap tanh(scale x / soft_cap).
struct LogitTransform {
  float scale = 1.0f;
  float soft_cap = 0.0f;  // 0: none.

  bool identity() const { return scale == 1.0f && soft_cap == 0.0f; }
};

// logits = round(T(round(logits))), in place.
extern Op<void(const Context&, const Matrix& logits, const LogitTransform& transform, DType precision)> TransformLogits;

// gradient = round(gradient T'(x)) in place, from the transformed logits T(x): gradient of the objective for T(x) on entry, for x
// on return. Dtypes may differ; as many rows and columns.
extern Op<void(const Context&, const Matrix& logits, const LogitTransform& transform, DType gradient_precision,
               const Matrix& gradient)>
    TransformLogitsBackward;

}  // namespace mbridge
