#include "engine/ops/sigmoid_gate.h"

#include <cmath>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void CheckSizes(const Tensor& x, const Tensor& gate, const Tensor& y) {
  if (x.size() == gate.size() && x.size() == y.size()) return;
  ThrowEngineError("gate of {} for {} into {}", gate.shape.ToString(), x.shape.ToString(), y.shape.ToString());
}

template <class P> float Sigmoid(float x) { return P::Round(1.0f / (1.0f + std::exp(-x))); }

void ForwardCpu(const Context&, const Tensor& x, const Tensor& gate, DType precision, const Tensor& y) {
  CheckSizes(x, gate, y);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *in = x.as<T>(), *g = gate.as<T>();
    T* out = y.as<T>();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < x.size(); ++i) out[i] = P::Store(P::Load(in[i]) * Sigmoid<P>(P::Load(g[i])));
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& gate, DType precision, const Tensor& dx,
                 const Tensor& d_gate) {
  CheckSizes(x, gate, dy);
  CheckSizes(x, dx, d_gate);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *d = dy.as<T>(), *in = x.as<T>(), *g = gate.as<T>();
    T *to_x = dx.as<T>(), *to_gate = d_gate.as<T>();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < x.size(); ++i) {
      const float slope = P::Load(d[i]), open = Sigmoid<P>(P::Load(g[i]));
      to_x[i] = P::Store(slope * open);
      to_gate[i] = P::Store(P::Round(slope * P::Load(in[i])) * open * (1.0f - open));
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, DType, const Tensor&)> SigmoidGateForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, DType, const Tensor&, const Tensor&)> SigmoidGateBackward{
    &BackwardCpu};

}  // namespace mbridge
