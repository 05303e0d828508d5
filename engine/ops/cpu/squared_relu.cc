#include "engine/ops/squared_relu.h"

#include "engine/ops/cpu/elementwise.h"

namespace mbridge {
namespace {

float Positive(float u) { return u > 0.0f ? u : 0.0f; }

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, DType precision, const Tensor& y) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    auto* out = y.as<typename P::Storage>();
    cpu::ForEachSum<P, true>(x, bias, [out](int64_t i, float u) { out[i] = P::Store(Positive(u) * Positive(u)); });
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, DType precision, const Tensor& dx) {
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    const auto* g = dy.as<typename P::Storage>();
    auto* out = dx.as<typename P::Storage>();
    cpu::ForEachSum<P, true>(x, bias, [g, out](int64_t i, float u) { out[i] = P::Store(2.0f * Positive(u) * P::Load(g[i])); });
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, DType, const Tensor&)> SquaredReluForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, DType, const Tensor&)> SquaredReluBackward{&BackwardCpu};

}  // namespace mbridge
