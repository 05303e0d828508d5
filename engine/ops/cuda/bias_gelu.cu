#include "engine/ops/bias_gelu.h"

#include "engine/ops/cuda/activation.h"
#include "engine/ops/cuda/gelu.h"

namespace mbridge::cuda {
namespace {

template <bool kBackward>
void Run(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
         const Tensor& out) {
  CheckStorage(x, precision);
  WithType(x.dtype, [&]<class T>(T) {
    WithGelu<T>(kind, [&]<class Gelu>(Gelu) { LaunchActivation<T, Gelu, kBackward>(context, dy, x, bias, out); });
  });
}

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y) {
  Run<false>(context, {}, x, bias, kind, precision, y);
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
                  const Tensor& dx) {
  Run<true>(context, dy, x, bias, kind, precision, dx);
}

const bool g_registered = (BiasGeluForward.cuda = &ForwardCuda, BiasGeluBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
