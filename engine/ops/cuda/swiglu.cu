#include "engine/ops/swiglu.h"

#include "engine/ops/cuda/gated.h"

namespace mbridge::cuda {
namespace {

template <class T> struct Silu {
  static __device__ float Value(float u) { return u * Sigmoid<T>(u); }
  static __device__ float Slope(float u) {
    const float s = Sigmoid<T>(u);
    return s * (1.0f + u * (1.0f - s));
  }
};

template <bool kBackward>
void Run(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
         const Tensor& out, const Tensor& amax) {
  CheckStorage(x, precision);
  CheckGatedWidth(x, kBackward ? dy : out);
  float* maximum = amax.empty() ? nullptr : amax.as<float>();
  WithType(x.dtype, [&]<class T>(T) {
    if (kind == SwiGluKind::kEager) {
      LaunchGated<T, Silu<T>, true, kBackward>(context, dy, x, bias, out, maximum);
    } else {
      LaunchGated<T, Silu<T>, false, kBackward>(context, dy, x, bias, out, maximum);
    }
  });
}

void ForwardWithAmaxCuda(const Context& context, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
                         const Tensor& y, const Tensor& amax) {
  Run<false>(context, {}, x, bias, kind, precision, y, amax);
}

void BackwardWithAmaxCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind,
                          DType precision, const Tensor& dx, const Tensor& amax) {
  Run<true>(context, dy, x, bias, kind, precision, dx, amax);
}

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision, const Tensor& y) {
  Run<false>(context, {}, x, bias, kind, precision, y, {});
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
                  const Tensor& dx) {
  Run<true>(context, dy, x, bias, kind, precision, dx, {});
}

const bool g_registered =
    (SwiGluForward.cuda = &ForwardCuda, SwiGluBackward.cuda = &BackwardCuda, SwiGluForwardWithAmax.cuda = &ForwardWithAmaxCuda,
     SwiGluBackwardWithAmax.cuda = &BackwardWithAmaxCuda, true);

}  // namespace
}  // namespace mbridge::cuda
