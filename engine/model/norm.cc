#include "engine/model/norm.h"

#include "engine/ops/layer_norm.h"
#include "engine/ops/rms_norm.h"

namespace mbridge {

NormOptions NormOptionsOf(const Step& step) {
  return {.epsilon = static_cast<float>(step.config->layernorm_epsilon),
          .gamma_offset = step.config->layernorm_zero_centered_gamma ? 1.0f : 0.0f,
          .precision = step.precision};
}

bool NormsTakeSums(const Step& step) { return step.config->normalization == NormKind::kRmsNorm; }

NormRecord NormRecord::Allocate(Arena* arena, const Step& step) {
  const Shape rows{step.stream_length() * step.micro_batch_size};
  NormRecord record;
  if (step.config->normalization == NormKind::kLayerNorm) record.mean = arena->Allocate(DType::kF32, rows);
  record.rstd = arena->Allocate(DType::kF32, rows);
  return record;
}

void Norm::Forward(const Step& step, const Weights& weights, const Tensor& x, const NormRecord& record, const Tensor& y,
                   const Tensor& amax) const {
  NormOptions options = NormOptionsOf(step);
  options.amax = amax;
  if (step.config->normalization == NormKind::kRmsNorm) {
    RmsNormForward(step.context, x, weights.value(gamma), options, y, record.rstd);
  } else {
    LayerNormForward(step.context, x, weights.value(gamma), weights.value(beta), options, y, record.mean, record.rstd);
  }
}

void Norm::ForwardOfSum(const Step& step, const Weights& weights, const OpenSum& sum, const Tensor& x, const NormRecord& record,
                        const Tensor& y, const Tensor& amax) const {
  if (sum.added.empty()) return Forward(step, weights, x, record, y, amax);
  NormOptions options = NormOptionsOf(step);
  options.amax = amax;
  AddRmsNormForward(step.context, sum.added, sum.residual, weights.value(gamma), options, x, y, record.rstd);
}

void Norm::Backward(const Step& step, const Weights& weights, const Tensor& dy, const Tensor& x, const NormRecord& record,
                    const Tensor& residual, const Tensor& dx, const Tensor& amax) const {
  NormOptions options = NormOptionsOf(step);
  options.amax = amax;
  if (step.config->normalization == NormKind::kRmsNorm) {
    RmsNormBackward(step.context, dy, x, weights.value(gamma), record.rstd, residual, options, dx, weights.main_grad(gamma));
  } else {
    LayerNormBackward(step.context, dy, x, weights.value(gamma), record.mean, record.rstd, residual, options, dx,
                      weights.main_grad(gamma), weights.main_grad(beta));
  }
}

}  // namespace mbridge
