#include "engine/model/weights.h"

#include <algorithm>

#include "engine/ops/convert.h"

namespace mbridge {

void InitializeParameter(const InitRule& rule, const Tensor& value, RngStreams* streams) {
  std::vector<float> draws(value.size());
  switch (rule.kind) {
    case InitRule::Kind::kConstant: std::fill(draws.begin(), draws.end(), rule.value); break;
    case InitRule::Kind::kModelParallelNormal:
      CudaNormal(&streams->model_parallel, streams->sm_count, 0.0f, rule.value, draws);
      break;
    case InitRule::Kind::kExpertNormal: CudaNormal(&streams->expert_parallel, streams->sm_count, 0.0f, rule.value, draws); break;
    case InitRule::Kind::kCpuNormal: streams->cpu.Normal(0.0f, rule.value, draws); break;
    case InitRule::Kind::kCpuEmbedding:
      streams->cpu.SkipNormal(value.size());
      streams->cpu.Normal(0.0f, rule.value, draws);
      break;
  }
  Convert({}, {draws.data(), DType::kF32, DeviceType::kCpu, value.shape}, value.dtype, value);
}

Weights::Weights(const ParameterStore* store, DType storage) : store_(store) {
  const Tensor all = store->values();
  if (store->dtype() != storage) {
    memory_ = Arena(all.size() * SizeOf(storage) + Arena::kAlignment);
    copy_ = memory_.Allocate(storage, all.shape);
  }
  for (const Parameter& parameter : store->parameters()) {
    Tensor value = parameter.value;
    main_grads_.push_back(parameter.main_grad);
    if (!copy_.empty() && parameter.spec.trainable) {
      const int64_t offset =
          (static_cast<char*>(value.data) - static_cast<char*>(all.data)) / static_cast<int64_t>(SizeOf(value.dtype));
      value = copy_.Rows(offset, value.size()).View(value.shape);
    }
    values_.push_back(value);
  }
  Refresh();
}

void Weights::Refresh() {
  if (!copy_.empty()) Convert({}, store_->values(), store_->dtype(), copy_);
}

}  // namespace mbridge
