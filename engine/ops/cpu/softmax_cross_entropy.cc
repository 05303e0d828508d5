#include "engine/ops/softmax_cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

// weight: null for no gradient.
template <class P> float Row(typename P::Storage* z, int64_t n, int64_t label, const float* weight) {
  const auto load = [z](int64_t j) { return ToFloat(z[j]); };
  float largest = load(0);
#pragma omp simd reduction(max : largest)
  for (int64_t j = 1; j < n; ++j) largest = std::max(largest, load(j));
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) sum += cpu::Exp(load(j) - largest);
  const float predicted = load(label);
  if (weight != nullptr) {
    const float w = *weight;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) z[j] = P::Store(cpu::Exp(load(j) - largest) / sum * w);
    z[label] = P::Store((cpu::Exp(predicted - largest) / sum - 1.0f) * w);
  }
  return std::log(sum) - (predicted - largest);
}

void SoftmaxCrossEntropyCpu(const Context&, const Tensor& logits, const Tensor& labels, const Tensor& weight,
                            DType gradient_precision, const Tensor& loss) {
  const int64_t rows = labels.size(), n = logits.shape[1];
  const int32_t* label = labels.as<int32_t>();
  const float* weights = weight.empty() ? nullptr : weight.as<float>();
  float* out = loss.as<float>();
  cpu::WithPrecision(logits.dtype, gradient_precision, [&]<class P>(P) {
    auto* values = logits.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      out[i] = Row<P>(values + i * n, n, label[i], weights == nullptr ? nullptr : weights + i);
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, DType, const Tensor&)> SoftmaxCrossEntropy{
    &SoftmaxCrossEntropyCpu};

}  // namespace mbridge
