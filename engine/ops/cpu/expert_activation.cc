#include "engine/ops/expert_activation.h"

#include <algorithm>
#include <vector>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

float SlopeOf(GateKind gate) { return gate == GateKind::kQuickGelu ? 1.702f : 1.0f; }

float LimitOf(const ExpertActivationOptions& o) { return o.clamp > 0.0f ? o.clamp : 3.4e38f; }

void ForwardCpu(const Context&, const Tensor& x, const ExpertRows& rows, const Tensor& probabilities,
                const ExpertActivationOptions& o, const Tensor& y) {
  const int64_t count = rows.slots.size(), n = y.size() / std::max<int64_t>(count, 1);
  if (x.size() != 2 * count * n) ThrowEngineError("gated activation of {} into {}", x.shape.ToString(), y.shape.ToString());
  const float slope = SlopeOf(o.gate), limit = LimitOf(o), offset = o.linear_offset;
  cpu::WithPrecision(x.dtype, o.precision, [&]<class P>(P) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < count; ++r) {
      const auto* in = x.as<typename P::Storage>() + r * 2 * n;
      auto* out = y.as<typename P::Storage>() + r * n;
      const float p = probabilities.as<float>()[rows.slots.as<int32_t>()[r]];
      const bool fused = o.fused;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float u1 = std::min(P::Load(in[j]), limit), u2 = std::clamp(P::Load(in[j + n]), -limit, limit) + offset;
        const float g = u1 * cpu::Sigmoid(slope * u1);
        out[j] = P::Store(fused ? g * u2 * p : P::Round(P::Round(g) * P::Round(u2)) * p);
      }
    }
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const ExpertRows& rows, const Tensor& probabilities,
                 const ExpertActivationOptions& o, const Tensor& dx, const Tensor& d_probabilities) {
  const int64_t count = rows.slots.size(), n = dy.size() / std::max<int64_t>(count, 1);
  if (x.size() != 2 * count * n) ThrowEngineError("gated activation of {}, gradient {}", x.shape.ToString(), dy.shape.ToString());
  const float slope = SlopeOf(o.gate), limit = LimitOf(o), offset = o.linear_offset;
  cpu::WithPrecision(x.dtype, o.precision, [&]<class P>(P) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < count; ++r) {
      const auto *in = x.as<typename P::Storage>() + r * 2 * n, *grad = dy.as<typename P::Storage>() + r * n;
      auto* out = dx.as<typename P::Storage>() + r * 2 * n;
      const int32_t slot = rows.slots.as<int32_t>()[r];
      const float p = probabilities.as<float>()[slot];
      const bool fused = o.fused;
      float weight_sum = 0.0f;
#pragma omp simd reduction(+ : weight_sum)
      for (int64_t j = 0; j < n; ++j) {
        const float x1 = P::Load(in[j]), x2 = P::Load(in[j + n]), d = P::Load(grad[j]);
        const float u1 = std::min(x1, limit), u2 = std::clamp(x2, -limit, limit) + offset;
        const float s = cpu::Sigmoid(slope * u1), gate = fused ? u1 * s : P::Round(u1 * s);
        const float weighted = fused ? d * p : P::Round(d * p);
        const float d1 = weighted * u2, d2 = weighted * gate;
        weight_sum += d * (fused ? gate * u2 : P::Round(gate * u2));
        out[j] = P::Store(x1 > limit ? 0.0f : (fused ? d1 : P::Round(d1)) * s * (1.0f + slope * u1 * (1.0f - s)));
        out[j + n] = P::Store(x2 > limit || x2 < -limit ? 0.0f : d2);
      }
      d_probabilities.as<float>()[slot] = o.router_precision == DType::kF32 ? weight_sum : P::Round(weight_sum);
    }
  });
}

// body(expert, row) for each row, in parallel over rows.
template <class Body> void ForEachRow(const ExpertRows& rows, size_t experts, Body&& body) {
  const int32_t* offsets = rows.offsets.as<int32_t>();
  for (size_t e = 0; e < experts; ++e) {
#pragma omp parallel for schedule(static)
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) body(e, r);
  }
}

void BiasAddCpu(const Context&, const Tensor& x, std::span<const Tensor> biases, const ExpertRows& rows,
                const Tensor& probabilities, DType precision) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using Storage = typename P::Storage;
    ForEachRow(rows, biases.size(), [&](size_t e, int64_t r) {
      const int64_t n = biases[e].size();
      const float p = probabilities.empty() ? 1.0f : probabilities.as<float>()[rows.slots.as<int32_t>()[r]];
      const Storage* bias = biases[e].template as<Storage>();
      Storage* row = x.as<Storage>() + r * n;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) row[j] = P::Store(P::Load(row[j]) + P::Round(P::Load(bias[j]) * p));
    });
  });
}

void BiasBackwardCpu(const Context&, const Tensor& dy, std::span<const Tensor> biases, const ExpertRows& rows,
                     const Tensor& probabilities, DType precision, std::span<const Tensor> main_grads,
                     const Tensor& d_probabilities) {
  const int32_t *offsets = rows.offsets.as<int32_t>(), *slots = rows.slots.as<int32_t>();
  const float* weights = probabilities.empty() ? nullptr : probabilities.as<float>();
  cpu::WithPrecision(dy.dtype, precision, [&]<class P>(P) {
    using Storage = typename P::Storage;
    const Storage* grad = dy.as<Storage>();
#pragma omp parallel for schedule(static)
    for (size_t e = 0; e < biases.size(); ++e) {
      const int64_t n = biases[e].size();
      std::vector<float> sums(n);
      for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
        const float p = weights == nullptr ? 1.0f : weights[slots[r]];
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) sums[j] += P::Load(grad[r * n + j]) * p;
      }
      for (int64_t j = 0; j < n; ++j) main_grads[e].as<float>()[j] += P::Round(sums[j]);
    }
    if (weights == nullptr) return;
    ForEachRow(rows, biases.size(), [&](size_t e, int64_t r) {
      const int64_t n = biases[e].size();
      const Storage* bias = biases[e].template as<Storage>();
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) sum += P::Load(grad[r * n + j]) * P::Load(bias[j]);
      d_probabilities.as<float>()[slots[r]] += sum;
    });
  });
}

void SharedGateForwardCpu(const Context&, const Tensor& x, const Tensor& logits, DType precision, const Tensor& y) {
  const int64_t tokens = logits.size(), n = x.size() / tokens;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using Storage = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      const float gate = P::Round(cpu::Sigmoid(P::Round(logits.as<float>()[t])));
      const Storage* in = x.as<Storage>() + t * n;
      Storage* out = y.as<Storage>() + t * n;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) out[j] = P::Store(P::Load(in[j]) * gate);
    }
  });
}

void SharedGateBackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& logits, DType precision,
                           const Tensor& dx, const Tensor& d_logits) {
  const int64_t tokens = logits.size(), n = x.size() / tokens;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using Storage = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      const float sigmoid = cpu::Sigmoid(P::Round(logits.as<float>()[t])), gate = P::Round(sigmoid);
      const Storage *grad = dy.as<Storage>() + t * n, *in = x.as<Storage>() + t * n;
      Storage* out = dx.as<Storage>() + t * n;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) {
        const float d = P::Load(grad[j]);
        sum += d * P::Load(in[j]);
        out[j] = P::Store(d * gate);
      }
      d_logits.as<float>()[t] = P::Round(P::Round(sum) * gate * (1.0f - gate));
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const ExpertRows&, const Tensor&, const ExpertActivationOptions&, const Tensor&)>
    ExpertActivationForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const ExpertRows&, const Tensor&, const ExpertActivationOptions&,
        const Tensor&, const Tensor&)>
    ExpertActivationBackward{&BackwardCpu};
Op<void(const Context&, const Tensor&, std::span<const Tensor>, const ExpertRows&, const Tensor&, DType)> ExpertBiasAdd{
    &BiasAddCpu};
Op<void(const Context&, const Tensor&, std::span<const Tensor>, const ExpertRows&, const Tensor&, DType, std::span<const Tensor>,
        const Tensor&)>
    ExpertBiasBackward{&BiasBackwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, DType, const Tensor&)> SharedGateForward{&SharedGateForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, DType, const Tensor&, const Tensor&)> SharedGateBackward{
    &SharedGateBackwardCpu};

}  // namespace mbridge
