#include "engine/ops/bias_gelu.h"

#include <type_traits>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

// The constants are those of Megatron-LM's text, not exact ones.
struct Tanh {
  // 0.5 (1 + tanh(a)) = sigmoid(2a), which keeps its accuracy for large negative a.
  static float Half(float u) { return cpu::Sigmoid(2.0f * (0.79788456f * u * (1.0f + 0.044715f * u * u))); }
  static float Value(float u) { return u * Half(u); }
  static float Slope(float u) {
    const float half = Half(u);
    const float one_minus_square = 4.0f * half * (1.0f - half);  // 1 - tanh^2.
    return 0.5f * u * one_minus_square * (0.79788456f + 0.1070322243f * u * u) + half;
  }
};

struct ExactErf {
  static float Half(float u) { return 0.5f * (1.0f + cpu::Erf(u * 0.70710678f)); }
  static float Value(float u) { return u * Half(u); }
  static float Slope(float u) { return Half(u) + u * (0.39894228f * cpu::Exp(-0.5f * u * u)); }
};

template <class P, class Gelu, bool kRoundSum, class F> void ForEach(const Tensor& x, const Tensor& bias, F&& apply) {
  const int64_t n = x.shape[x.shape.rank() - 1], rows = x.size() / n;
  const auto* values = x.as<typename P::Storage>();
  const auto* b = bias.empty() ? nullptr : bias.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const auto* row = values + i * n;
    if (b == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) apply(i * n + j, P::Load(row[j]));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float u = P::Load(row[j]) + P::Load(b[j]);
        apply(i * n + j, kRoundSum ? P::Round(u) : u);
      }
    }
  }
}

// f(Gelu, whether the sum is rounded).
template <class F> void WithKind(GeluKind kind, F&& f) {
  switch (kind) {
    case GeluKind::kTanhFused: return f(Tanh(), std::false_type());
    case GeluKind::kErf: return f(ExactErf(), std::true_type());
    case GeluKind::kErfFused: return f(ExactErf(), std::false_type());
  }
}

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    auto* out = y.as<typename P::Storage>();
    WithKind(kind, [&]<class Gelu, bool kRoundSum>(Gelu, std::bool_constant<kRoundSum>) {
      ForEach<P, Gelu, kRoundSum>(x, bias, [out](int64_t i, float u) { out[i] = P::Store(Gelu::Value(u)); });
    });
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
                 const Tensor& dx) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    const auto* g = dy.as<typename P::Storage>();
    auto* out = dx.as<typename P::Storage>();
    WithKind(kind, [&]<class Gelu, bool kRoundSum>(Gelu, std::bool_constant<kRoundSum>) {
      ForEach<P, Gelu, kRoundSum>(x, bias, [g, out](int64_t i, float u) { out[i] = P::Store(Gelu::Slope(u) * P::Load(g[i])); });
    });
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, GeluKind, DType, const Tensor&)> BiasGeluForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, GeluKind, DType, const Tensor&)> BiasGeluBackward{
    &BackwardCpu};

}  // namespace mbridge
