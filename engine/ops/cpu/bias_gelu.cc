#include "engine/ops/bias_gelu.h"

#include <type_traits>

#include "engine/ops/cpu/elementwise.h"
#include "engine/ops/cpu/gelu.h"

namespace mbridge {
namespace {

// f(Gelu, whether the sum is rounded).
template <class F> void WithKind(GeluKind kind, F&& f) {
  switch (kind) {
    case GeluKind::kTanhFused: return f(cpu::TanhGelu(), std::false_type());
    case GeluKind::kTanh: return f(cpu::TanhGelu(), std::true_type());
    case GeluKind::kErf: return f(cpu::ErfGelu(), std::true_type());
    case GeluKind::kErfFused: return f(cpu::ErfGelu(), std::false_type());
  }
}

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    auto* out = y.as<typename P::Storage>();
    WithKind(kind, [&]<class Gelu, bool kRoundSum>(Gelu, std::bool_constant<kRoundSum>) {
      cpu::ForEachSum<P, kRoundSum>(x, bias, [out](int64_t i, float u) { out[i] = P::Store(Gelu::Value(u)); });
    });
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
                 const Tensor& dx) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    const auto* g = dy.as<typename P::Storage>();
    auto* out = dx.as<typename P::Storage>();
    WithKind(kind, [&]<class Gelu, bool kRoundSum>(Gelu, std::bool_constant<kRoundSum>) {
      cpu::ForEachSum<P, kRoundSum>(x, bias, [g, out](int64_t i, float u) { out[i] = P::Store(Gelu::Slope(u) * P::Load(g[i])); });
    });
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, GeluKind, DType, const Tensor&)> BiasGeluForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, GeluKind, DType, const Tensor&)> BiasGeluBackward{
    &BackwardCpu};

}  // namespace mbridge
