// A norm of the model's kind over the hidden size.
#pragma once

#include "engine/core/arena.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"
#include "engine/ops/norm_options.h"

namespace mbridge {

// Epsilon, offset of gamma and precision of the model's norms.
NormOptions NormOptionsOf(const Step& step);

// Whether the model's norms take open sums.
bool NormsTakeSums(const Step& step);

// What a norm's backward needs.
struct NormRecord {
  Tensor mean;  // F32 [stream length * b]; empty for RMSNorm.
  Tensor rstd;  // F32 [stream length * b].

  static NormRecord Allocate(Arena* arena, const Step& step);
};

// What is still to be added to the residual stream before its next norm: stream = round(residual + added). Empty: nothing.
struct OpenSum {
  Tensor residual, added;
};

struct Norm {
  int gamma = -1;  // Index of [h].
  int beta = -1;   // Index of [h], -1 for RMSNorm.

  // y = norm(x), both [stream length, b, h]. amax F32 [1] or empty: raised to the largest |y|.
  void Forward(const Step& step, const Weights& weights, const Tensor& x, const NormRecord& record, const Tensor& y,
               const Tensor& amax = {}) const;
  // The same after x was made from an open sum, if there is one.
  void ForwardOfSum(const Step& step, const Weights& weights, const OpenSum& sum, const Tensor& x, const NormRecord& record,
                    const Tensor& y, const Tensor& amax = {}) const;
  // dx = round(residual + round(norm's input gradient)), without residual (empty) the latter; dx may be dy or residual. Adds to
  // the main gradients. amax: raised to the largest |dx|.
  void Backward(const Step& step, const Weights& weights, const Tensor& dy, const Tensor& x, const NormRecord& record,
                const Tensor& residual, const Tensor& dx, const Tensor& amax = {}) const;
};

}  // namespace mbridge
