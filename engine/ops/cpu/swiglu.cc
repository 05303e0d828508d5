#include "engine/ops/swiglu.h"

#include <type_traits>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

// apply(place in y, u1, u2) for every pair.
template <class P, bool kEager, class F> void ForEachPair(const Tensor& x, const Tensor& bias, F&& apply) {
  const int64_t width = x.shape[x.shape.rank() - 1], n = width / 2, rows = x.size() / width;
  const auto* values = x.as<typename P::Storage>();
  const auto* b = bias.empty() ? nullptr : bias.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const auto* row = values + i * width;
    if (b == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) apply(i, j, P::Load(row[j]), P::Load(row[j + n]));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float u1 = P::Load(row[j]) + P::Load(b[j]), u2 = P::Load(row[j + n]) + P::Load(b[j + n]);
        apply(i, j, kEager ? P::Round(u1) : u1, kEager ? P::Round(u2) : u2);
      }
    }
  }
}

template <class F> void WithKind(SwiGluKind kind, F&& f) {
  if (kind == SwiGluKind::kEager) return f(std::true_type());
  return f(std::false_type());
}

void CheckWidth(const Tensor& x, const Tensor& y) {
  if (x.size() != 2 * y.size()) ThrowEngineError("gated activation of {} into {}", x.shape.ToString(), y.shape.ToString());
}

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision, const Tensor& y) {
  CheckWidth(x, y);
  const int64_t n = x.shape[x.shape.rank() - 1] / 2;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    auto* out = y.as<typename P::Storage>();
    WithKind(kind, [&]<bool kEager>(std::bool_constant<kEager>) {
      ForEachPair<P, kEager>(x, bias, [out, n](int64_t i, int64_t j, float u1, float u2) {
        const float silu = u1 * cpu::Sigmoid(u1);
        out[i * n + j] = P::Store((kEager ? P::Round(silu) : silu) * u2);
      });
    });
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
                 const Tensor& dx) {
  CheckWidth(x, dy);
  const int64_t n = x.shape[x.shape.rank() - 1] / 2;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    const auto* g = dy.as<typename P::Storage>();
    auto* out = dx.as<typename P::Storage>();
    WithKind(kind, [&]<bool kEager>(std::bool_constant<kEager>) {
      ForEachPair<P, kEager>(x, bias, [g, out, n](int64_t i, int64_t j, float u1, float u2) {
        const float d = P::Load(g[i * n + j]), s = cpu::Sigmoid(u1), slope = s * (1.0f + u1 * (1.0f - s));
        const float scaled = kEager ? P::Round(d * u2) : d * u2, silu = kEager ? P::Round(u1 * s) : u1 * s;
        out[i * 2 * n + j] = P::Store(scaled * slope);
        out[i * 2 * n + n + j] = P::Store(d * silu);
      });
    });
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, SwiGluKind, DType, const Tensor&)> SwiGluForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, SwiGluKind, DType, const Tensor&)> SwiGluBackward{
    &BackwardCpu};

}  // namespace mbridge
