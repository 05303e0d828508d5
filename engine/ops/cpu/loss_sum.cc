#include "engine/ops/loss_sum.h"

#include <algorithm>

namespace mbridge {
namespace {

void SetTargetsCpu(const Context&, const Tensor& labels, const Tensor& mask, float grad_scale, const Tensor& labels_out,
                   const Tensor& weight) {
  const int64_t b = mask.shape[0], s = mask.shape[1];
  const int32_t* label = labels.as<int32_t>();
  const float* m = mask.as<float>();
  int32_t* to = labels_out.as<int32_t>();
  float* weights = weight.as<float>();
  double tokens = 0;
  for (int64_t i = 0; i < b * s; ++i) tokens += m[i];
  const float per_token = grad_scale / static_cast<float>(std::max(tokens, 1.0));
  for (int64_t i = 0; i < b; ++i) {
    for (int64_t j = 0; j < s; ++j) {
      to[j * b + i] = label[i * s + j];
      weights[j * b + i] = m[i * s + j] * per_token;
    }
  }
}

void AddLossSumsCpu(const Context&, const Tensor& loss, const Tensor& mask, const Tensor& totals) {
  const int64_t b = mask.shape[0], s = mask.shape[1];
  const float *l = loss.as<float>(), *m = mask.as<float>();
  double* sums = totals.as<double>();
  double losses = 0, tokens = 0;
  for (int64_t i = 0; i < b; ++i) {
    for (int64_t j = 0; j < s; ++j) {
      losses += static_cast<double>(l[j * b + i] * m[i * s + j]);
      tokens += m[i * s + j];
    }
  }
  sums[0] += static_cast<float>(losses);  // Megatron-LM's sum is an fp32 number.
  sums[1] += tokens;
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, float, const Tensor&, const Tensor&)> SetTargets{&SetTargetsCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&)> AddLossSums{&AddLossSumsCpu};

}  // namespace mbridge
