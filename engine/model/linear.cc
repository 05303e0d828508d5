#include "engine/model/linear.h"

#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"

namespace mbridge {

void Linear::Forward(const Step& step, const Weights& weights, const Tensor& x, const Tensor& y, const NarrowInput& kept) const {
  const Tensor input = split == LinearSplit::kColumns ? GatherSequence(step, x) : x;
  const Tensor output = split == LinearSplit::kRows ? PartialSum(step, y) : y;
  if (narrow >= 0) {
    step.narrow->Forward(narrow, input, kept, step.training(), output);
  } else {
    Gemm(step.context, AsMatrix(input), AsMatrix(weights.value(weight)), AsMatrix(output), {.transpose_b = true});
  }
  if (split == LinearSplit::kRows) SumPartial(step, output, y);
}

void Linear::Backward(const Step& step, const Weights& weights, const Tensor& dy, const Tensor& x, const Tensor& dx,
                      const Tensor& scratch, const NarrowInput& kept) const {
  const Tensor& w = weights.value(weight);
  const Tensor d_output = split == LinearSplit::kRows ? GatherSequence(step, dy) : dy;
  const auto input_gradient = [&] {
    const Tensor d_input = split == LinearSplit::kColumns ? PartialSum(step, dx) : dx;
    if (narrow >= 0) {
      step.narrow->InputGradient(narrow, d_output, d_input);
    } else {
      Gemm(step.context, AsMatrix(d_output), AsMatrix(w), AsMatrix(d_input), {});
    }
    if (split == LinearSplit::kColumns) SumPartial(step, d_input, dx);
  };
  // The input is gathered again rather than kept: that memory would grow with the layers.
  const auto weight_gradient = [&] {
    const bool read = kept.codes.empty();
    const Tensor input = read && split == LinearSplit::kColumns ? GatherSequence(step, x) : x;
    if (narrow >= 0) return step.narrow->WeightGradient(narrow, d_output, input, kept, weights.main_grad(weight));
    if (step.fuse_gradients()) {
      return Gemm(step.context, AsMatrix(d_output), AsMatrix(input), AsMatrix(weights.main_grad(weight)),
                  {.transpose_a = true, .accumulate = true});
    }
    const Tensor grad = Tensor{scratch.data, DType::kF32, scratch.device, w.shape};
    Gemm(step.context, AsMatrix(d_output), AsMatrix(input), AsMatrix(grad), {.transpose_a = true});
    AddGradient(step.context, grad, step.precision, weights.main_grad(weight));
  };
  // The input's gradient, which the next operator reads, is best written last: part of it is in a GPU's L2 cache then. Narrow
  // layers leave what their weight's gradient wants where the input's is made.
  if (narrow >= 0) input_gradient();
  weight_gradient();
  if (narrow < 0) input_gradient();
}

}  // namespace mbridge
