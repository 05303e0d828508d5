#include "engine/ops/squared_relu.h"

#include "engine/ops/cuda/activation.h"

namespace mbridge::cuda {
namespace {

struct SquaredRelu {
  static constexpr bool kRoundSum = true;
  static __device__ float Positive(float u) { return u > 0.0f ? u : 0.0f; }
  static __device__ float Value(float u) { return Positive(u) * Positive(u); }
  static __device__ float Slope(float u) { return 2.0f * Positive(u); }
};

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& bias, DType precision, const Tensor& y) {
  CheckStorage(x, precision);
  WithType(x.dtype, [&]<class T>(T) { LaunchActivation<T, SquaredRelu, false>(context, {}, x, bias, y); });
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, DType precision,
                  const Tensor& dx) {
  CheckStorage(x, precision);
  WithType(x.dtype, [&]<class T>(T) { LaunchActivation<T, SquaredRelu, true>(context, dy, x, bias, dx); });
}

const bool g_registered = (SquaredReluForward.cuda = &ForwardCuda, SquaredReluBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
