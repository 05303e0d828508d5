#include "engine/ops/vocab_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

void BeginCpu(const Context&, const CrossEntropyState& state) {
  std::fill_n(state.maximum.as<float>(), state.maximum.size(), -std::numeric_limits<float>::infinity());
  std::fill_n(state.sum.as<float>(), state.sum.size(), 0.0f);
  std::fill_n(state.predicted.as<float>(), state.predicted.size(), 0.0f);
}

template <class P, class Compact>
void FoldRow(const typename P::Storage* tile, int64_t n, Compact* kept, float* maximum, float* sum) {
  float largest = *maximum;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < n; ++j) largest = std::max(largest, P::Load(tile[j]));
  float added = 0.0f;
  if (kept != nullptr) {
#pragma omp simd reduction(+ : added)
    for (int64_t j = 0; j < n; ++j) {
      const float z = P::Load(tile[j]);
      kept[j] = cpu::Narrow<Compact>(z);
      added += cpu::Exp(z - largest);
    }
  } else {
#pragma omp simd reduction(+ : added)
    for (int64_t j = 0; j < n; ++j) added += cpu::Exp(P::Load(tile[j]) - largest);
  }
  *sum = *sum * (*maximum == largest ? 1.0f : cpu::Exp(*maximum - largest)) + added;
  *maximum = largest;
}

void FoldCpu(const Context&, const Tensor& tile, int64_t first, int64_t n, const Tensor& labels, DType precision,
             const CrossEntropyState& state, const Tensor& logits) {
  const int64_t rows = labels.size(), stride = tile.shape[1];
  const int32_t* label = labels.as<int32_t>();
  float *maximum = state.maximum.as<float>(), *sum = state.sum.as<float>(), *predicted = state.predicted.as<float>();
  cpu::WithPrecision(tile.dtype, precision, [&]<class P>(P) {
    using Compact = typename cpu::CompactOf<P::kPrecision>::Type;
    const auto* values = tile.as<typename P::Storage>();
    Compact* kept = logits.empty() ? nullptr : logits.as<Compact>() + first;
    const int64_t kept_stride = logits.empty() ? 0 : logits.shape[1];
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const auto* row = values + i * stride;
      FoldRow<P>(row, n, kept == nullptr ? nullptr : kept + i * kept_stride, maximum + i, sum + i);
      if (label[i] >= first && label[i] < first + n) predicted[i] = P::Load(row[label[i] - first]);
    }
  });
}

void RescaleCpu(const Context&, const CrossEntropyState& state, const Tensor& largest) {
  float *maximum = state.maximum.as<float>(), *sum = state.sum.as<float>();
  const float* to = largest.as<float>();
  for (int64_t i = 0; i < largest.size(); ++i) {
    if (maximum[i] != to[i]) sum[i] *= cpu::Exp(maximum[i] - to[i]);
    maximum[i] = to[i];
  }
}

void LossCpu(const Context&, const CrossEntropyState& state, const Tensor& loss) {
  const float *maximum = state.maximum.as<float>(), *sum = state.sum.as<float>(), *predicted = state.predicted.as<float>();
  float* out = loss.as<float>();
  for (int64_t i = 0; i < loss.size(); ++i) out[i] = std::log(sum[i]) - (predicted[i] - maximum[i]);
}

void GradientCpu(const Context&, const Tensor& logits, int64_t first, int64_t n, const Tensor& labels, const Tensor& weight,
                 const CrossEntropyState& state, DType gradient_precision, const Tensor& tile) {
  const int64_t rows = labels.size(), stride = tile.shape[1], kept_stride = logits.shape[1];
  const int32_t* label = labels.as<int32_t>();
  const float *maximum = state.maximum.as<float>(), *sum = state.sum.as<float>(), *weights = weight.as<float>();
  const auto run = [&]<class P, class Compact>(P, const Compact* kept) {
    auto* out = tile.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      auto* row = out + i * stride;
      const Compact* z = kept + i * kept_stride + first;
      const float m = maximum[i], total = sum[i], w = weights[i];
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) row[j] = P::Store(cpu::Exp(ToFloat(z[j]) - m) / total * w);
      const int64_t hit = label[i] - first;
      if (hit >= 0 && hit < n) row[hit] = P::Store((cpu::Exp(ToFloat(z[hit]) - m) / total - 1.0f) * w);
    }
  };
  cpu::WithPrecision(tile.dtype, gradient_precision, [&]<class P>(P) {
    switch (logits.dtype) {
      case DType::kBF16: return run(P(), logits.as<BFloat16>());
      case DType::kF16: return run(P(), logits.as<Float16>());
      default: return run(P(), logits.as<float>());
    }
  });
}

}  // namespace

Op<void(const Context&, const CrossEntropyState&)> CrossEntropyBegin{&BeginCpu};
Op<void(const Context&, const Tensor&, int64_t, int64_t, const Tensor&, DType, const CrossEntropyState&, const Tensor&)>
    CrossEntropyFold{&FoldCpu};
Op<void(const Context&, const CrossEntropyState&, const Tensor&)> CrossEntropyRescale{&RescaleCpu};
Op<void(const Context&, const CrossEntropyState&, const Tensor&)> CrossEntropyLoss{&LossCpu};
Op<void(const Context&, const Tensor&, int64_t, int64_t, const Tensor&, const Tensor&, const CrossEntropyState&, DType,
        const Tensor&)>
    CrossEntropyGradient{&GradientCpu};

}  // namespace mbridge
