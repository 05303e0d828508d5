#include "engine/ops/layer_norm.h"

#include "engine/ops/cuda/norm_rows.h"

namespace mbridge::cuda {
namespace {

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, const NormOptions& options,
                 const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  CheckStorage(x, options.precision);
  const int64_t h = LastDimension(x);
  WithType(x.dtype, [&]<class T>(T) {
    LaunchNormForward<T, true>(context, {PointerOf<T>(x), PointerOf<T>(gamma), PointerOf<T>(beta), x.size() / h,
                                         static_cast<int>(h), options.epsilon, options.gamma_offset, PointerOf<T>(y),
                                         PointerOf<float>(mean), PointerOf<float>(rstd), PointerOf<float>(options.amax)});
  });
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean,
                  const Tensor& rstd, const Tensor& d_residual, const NormOptions& options, const Tensor& dx,
                  const Tensor& gamma_grad, const Tensor& beta_grad) {
  CheckStorage(x, options.precision);
  const int64_t h = LastDimension(x);
  WithType(x.dtype, [&]<class T>(T) {
    LaunchNormBackward<T, true>(context,
                                {PointerOf<T>(dy), PointerOf<T>(x), PointerOf<T>(gamma), PointerOf<float>(mean),
                                 PointerOf<float>(rstd), PointerOf<T>(d_residual), x.size() / h, static_cast<int>(h),
                                 options.gamma_offset, PointerOf<T>(dx), nullptr, PointerOf<float>(options.amax)},
                                {{PointerOf<float>(gamma_grad), PointerOf<float>(beta_grad)}});
  });
}

const bool g_registered = (LayerNormForward.cuda = &ForwardCuda, LayerNormBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
