#include "engine/model/linear.h"

#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"

namespace mbridge {

void Linear::Forward(const Step& step, const Weights& weights, const Tensor& x, const Tensor& y) const {
  Gemm(step.context, AsMatrix(x), AsMatrix(weights.value(weight)), AsMatrix(y), {.transpose_b = true});
}

void Linear::Backward(const Step& step, const Weights& weights, const Tensor& dy, const Tensor& x, const Tensor& dx,
                      const Tensor& scratch) const {
  const Tensor& w = weights.value(weight);
  Gemm(step.context, AsMatrix(dy), AsMatrix(w), AsMatrix(dx), {});
  const Tensor grad = Tensor{scratch.data, DType::kF32, scratch.device, w.shape};
  Gemm(step.context, AsMatrix(dy), AsMatrix(x), AsMatrix(grad), {.transpose_a = true});
  AddGradient(step.context, grad, step.precision, weights.main_grad(weight));
}

}  // namespace mbridge
