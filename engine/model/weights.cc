#include "engine/model/weights.h"

#include <algorithm>
#include <cmath>

#include "engine/core/device.h"
#include "engine/core/philox.h"
#include "engine/ops/convert.h"
#include "engine/ops/normal_init.h"

namespace mbridge {
namespace {

// tensor.uniform_(0, 1) on a CUDA device; advances the stream.
void CudaUniform(PhiloxStream* stream, int sm_count, std::vector<float>* out) {
  const auto count = static_cast<int64_t>(out->size()), threads = CudaDrawThreads(count, sm_count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t turn = i / threads;
    const uint32_t word = PhiloxAt(stream->seed, i % threads, stream->offset + turn / 4 * 4)[turn % 4];
    const float u = std::fma(static_cast<float>(word), 0x1p-32f, 0x1p-33f);  // In (0, 1].
    (*out)[static_cast<size_t>(i)] = u == 1.0f ? 0.0f : u;
  }
  stream->offset += CudaDrawAdvance(count, sm_count);
}

// What a uniform number in [0, 1) becomes.
float FromUniform(const InitRule& rule, float u) {
  if (rule.kind == InitRule::Kind::kUniform) return (2.0f * u - 1.0f) * rule.value;
  if (rule.kind == InitRule::Kind::kMambaLog) return std::log(1.0f + 15.0f * u);
  constexpr double kLeast = 0.001, kMost = 0.1;
  const double dt = std::exp(u * std::log(kMost / kLeast) + std::log(kLeast));
  return static_cast<float>(dt + std::log(-std::expm1(-dt)));
}

}  // namespace

void InitializeParameter(const Context& context, const InitRule& rule, const Tensor& value, RngStreams* streams) {
  using Kind = InitRule::Kind;
  PhiloxStream* stream = rule.kind == Kind::kModelParallelNormal ? &streams->model_parallel
                         : rule.kind == Kind::kReplicatedNormal  ? &streams->default_stream
                         : rule.kind == Kind::kExpertNormal      ? &streams->expert_parallel
                                                                 : nullptr;
  if (stream != nullptr) {
    DrawNormal(context, *stream, streams->sm_count, 0.0f, rule.value, value);
    stream->offset += CudaDrawAdvance(value.size(), streams->sm_count);
    return;
  }
  std::vector<float> draws(value.size(), rule.value);
  if (rule.kind == Kind::kCpuEmbedding) streams->cpu.SkipNormal(value.size());
  if (rule.kind == Kind::kUniform || rule.kind == Kind::kMambaDt || rule.kind == Kind::kMambaLog) {
    CudaUniform(&streams->model_parallel, streams->sm_count, &draws);
    for (float& draw : draws) draw = FromUniform(rule, draw);
  } else if (rule.kind == Kind::kCpuNormal || rule.kind == Kind::kCpuEmbedding) {
    streams->cpu.Normal(0.0f, rule.value, draws);
  }
  std::vector<char> rounded(value.bytes());
  Convert({}, {draws.data(), DType::kF32, DeviceType::kCpu, value.shape}, value.dtype,
          {rounded.data(), value.dtype, DeviceType::kCpu, value.shape});
  Device& device = DeviceOf(context.device);
  device.CopyToDevice(context, value.data, rounded.data(), rounded.size());
  device.Synchronize(context);
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
  RefreshBelow(static_cast<int>(values_.size()));
}

void Weights::RefreshBelow(int end) {
  for (; fresh_below_ < end; ++fresh_below_) {
    const Parameter& parameter = (*store_)[fresh_below_];
    if (copy_.empty() || !parameter.spec.trainable) continue;
    Convert({}, parameter.value, store_->dtype(), values_[static_cast<size_t>(fresh_below_)]);
  }
}

}  // namespace mbridge
