#include "engine/ops/dropout.h"

#include <algorithm>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void DropoutCpu(const Context&, const Tensor& x, const Tensor& keep, double p, DType precision, const Tensor& y) {
  const int64_t count = x.size();
  const float scale = DropoutScale(DropoutKind::kEager, p);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    const auto* in = x.as<typename P::Storage>();
    const auto* kept = keep.as<uint8_t>();
    auto* out = y.as<typename P::Storage>();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; ++i) out[i] = P::Store(P::Load(in[i]) * static_cast<float>(kept[i]) * scale);
  });
}

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& keep, double p,
                DropoutKind kind, DType precision, const Tensor& y) {
  const int64_t n = x.shape[x.shape.rank() - 1], rows = x.size() / n;
  const float scale = DropoutScale(kind, p);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const auto run = [&]<bool kBias, bool kKeep, bool kFused>(std::bool_constant<kBias>, std::bool_constant<kKeep>,
                                                              std::bool_constant<kFused>) {
      const T *in = x.as<T>(), *b = kBias ? bias.as<T>() : nullptr, *res = residual.as<T>();
      const uint8_t* kept = kKeep ? keep.as<uint8_t>() : nullptr;
      T* out = y.as<T>();
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t begin = i * n;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          float v = P::Load(in[begin + j]);
          if constexpr (kBias) v = kFused ? v + P::Load(b[j]) : P::Round(v + P::Load(b[j]));
          if constexpr (kKeep) {
            v = v * static_cast<float>(kept[begin + j]) * scale;
            if constexpr (!kFused) v = P::Round(v);
          }
          out[begin + j] = P::Store(P::Load(res[begin + j]) + v);
        }
      }
    };
    const auto with_kind = [&](auto has_bias, auto has_keep) {
      if (kind == DropoutKind::kCompiled)
        run(has_bias, has_keep, std::true_type());
      else
        run(has_bias, has_keep, std::false_type());
    };
    const auto with_keep = [&](auto has_bias) {
      if (keep.empty())
        with_kind(has_bias, std::false_type());
      else
        with_kind(has_bias, std::true_type());
    };
    if (bias.empty())
      with_keep(std::false_type());
    else
      with_keep(std::true_type());
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& keep, double p, DropoutKind kind, DType precision,
                 const Tensor& dx, const Tensor& bias_grad) {
  constexpr int64_t kBlock = 64;  // Columns of a thread's turn: the bias gradient is summed in row order.
  const int64_t n = dy.shape[dy.shape.rank() - 1], rows = dy.size() / n, blocks = (n + kBlock - 1) / kBlock;
  const float scale = keep.empty() ? 1.0f : DropoutScale(kind, p);
  cpu::WithPrecision(dy.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const auto run = [&]<bool kKeep, bool kFused>(std::bool_constant<kKeep>, std::bool_constant<kFused>) {
      const T* g = dy.as<T>();
      const uint8_t* kept = kKeep ? keep.as<uint8_t>() : nullptr;
      T* out = dx.as<T>();
      float* grad = bias_grad.empty() ? nullptr : bias_grad.as<float>();
#pragma omp parallel for schedule(static)
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kBlock, width = std::min(kBlock, n - first);
        float sum[kBlock] = {};
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t begin = i * n + first;
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) {
            float v = P::Load(g[begin + j]);
            if constexpr (kKeep) v = v * static_cast<float>(kept[begin + j]) * scale;
            const float rounded = P::Round(v);
            sum[j] += kFused ? v : rounded;
            out[begin + j] = P::Store(rounded);
          }
        }
        if (grad == nullptr) continue;
        for (int64_t j = 0; j < width; ++j) grad[first + j] += P::Round(sum[j]);
      }
    };
    const auto with_kind = [&](auto has_keep) {
      if (kind == DropoutKind::kCompiled)
        run(has_keep, std::true_type());
      else
        run(has_keep, std::false_type());
    };
    if (keep.empty())
      with_kind(std::false_type());
    else
      with_kind(std::true_type());
  });
}

}  // namespace

float DropoutScale(DropoutKind kind, double p) {
  return kind == DropoutKind::kEager ? 1.0f / static_cast<float>(1.0 - p) : static_cast<float>(1.0 / (1.0 - p));
}

Op<void(const Context&, const Tensor&, const Tensor&, double, DType, const Tensor&)> Dropout{&DropoutCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, DropoutKind, DType, const Tensor&)>
    BiasDropoutAddForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, double, DropoutKind, DType, const Tensor&, const Tensor&)>
    BiasDropoutAddBackward{&BackwardCpu};

}  // namespace mbridge
