#include "engine/ops/swiglu.h"

#include "engine/ops/cpu/elementwise.h"
#include "engine/ops/cpu/vector_math.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge {
namespace {

struct Silu {
  static float Value(float u) { return u * cpu::Sigmoid(u); }
  static float Slope(float u) {
    const float s = cpu::Sigmoid(u);
    return s * (1.0f + u * (1.0f - s));
  }
};

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision, const Tensor& y) {
  cpu::CheckGatedWidth(x, y);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    if (kind == SwiGluKind::kEager) return cpu::GatedForward<P, Silu, true>(x, bias, y);
    cpu::GatedForward<P, Silu, false>(x, bias, y);
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
                 const Tensor& dx) {
  cpu::CheckGatedWidth(x, dy);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    if (kind == SwiGluKind::kEager) return cpu::GatedBackward<P, Silu, true>(dy, x, bias, dx);
    cpu::GatedBackward<P, Silu, false>(dy, x, bias, dx);
  });
}

void ForwardWithAmaxCpu(const Context& context, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
                        const Tensor& y, const Tensor& amax) {
  ForwardCpu(context, x, bias, kind, precision, y);
  Fp8Amax.cpu(context, y, amax);
}

void BackwardWithAmaxCpu(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind,
                         DType precision, const Tensor& dx, const Tensor& amax) {
  BackwardCpu(context, dy, x, bias, kind, precision, dx);
  Fp8Amax.cpu(context, dx, amax);
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, SwiGluKind, DType, const Tensor&)> SwiGluForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, SwiGluKind, DType, const Tensor&)> SwiGluBackward{
    &BackwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, SwiGluKind, DType, const Tensor&, const Tensor&)> SwiGluForwardWithAmax{
    &ForwardWithAmaxCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, SwiGluKind, DType, const Tensor&, const Tensor&)>
    SwiGluBackwardWithAmax{&BackwardWithAmaxCpu};

}  // namespace mbridge
