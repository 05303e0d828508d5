#include "engine/ops/grouped_gemm.h"

#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"

namespace mbridge {
namespace {

// body(expert, first row, rows) for each expert that has some.
template <class Body> void ForEachExpert(const Tensor& offsets, size_t experts, Body&& body) {
  if (offsets.size() != static_cast<int64_t>(experts) + 1) ThrowEngineError("{} offsets of {} experts", offsets.size(), experts);
  const int32_t* begin = offsets.as<int32_t>();
  for (size_t e = 0; e < experts; ++e) {
    if (begin[e + 1] > begin[e]) body(e, int64_t{begin[e]}, int64_t{begin[e + 1]} - begin[e]);
  }
}

void ForwardCpu(const Context& context, const Tensor& x, std::span<const Tensor> weights, const Tensor& offsets,
                const Tensor& y) {
  ForEachExpert(offsets, weights.size(), [&](size_t e, int64_t first, int64_t count) {
    Gemm(context, AsMatrix(x.Rows(first, count)), AsMatrix(weights[e]), AsMatrix(y.Rows(first, count)), {.transpose_b = true});
  });
}

void InputGradientCpu(const Context& context, const Tensor& dy, std::span<const Tensor> weights, const Tensor& offsets,
                      const Tensor& dx) {
  ForEachExpert(offsets, weights.size(), [&](size_t e, int64_t first, int64_t count) {
    Gemm(context, AsMatrix(dy.Rows(first, count)), AsMatrix(weights[e]), AsMatrix(dx.Rows(first, count)), {});
  });
}

void WeightGradientCpu(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& offsets, DType precision,
                       std::span<const Tensor> main_grads, const Tensor& scratch) {
  ForEachExpert(offsets, main_grads.size(), [&](size_t e, int64_t first, int64_t count) {
    const Tensor gradient{scratch.data, DType::kF32, scratch.device, main_grads[e].shape};
    Gemm(context, AsMatrix(dy.Rows(first, count)), AsMatrix(x.Rows(first, count)), AsMatrix(gradient), {.transpose_a = true});
    AddGradient(context, gradient, precision, main_grads[e]);
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, std::span<const Tensor>, const Tensor&, const Tensor&)> GroupedGemm{&ForwardCpu};
Op<void(const Context&, const Tensor&, std::span<const Tensor>, const Tensor&, const Tensor&)> GroupedGemmInputGradient{
    &InputGradientCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, DType, std::span<const Tensor>, const Tensor&)>
    GroupedGemmWeightGradient{&WeightGradientCpu};

}  // namespace mbridge
