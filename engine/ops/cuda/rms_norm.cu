#include "engine/ops/rms_norm.h"

#include "engine/ops/cuda/norm_rows.h"

namespace mbridge::cuda {
namespace {

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& gamma, const NormOptions& options, const Tensor& y,
                 const Tensor& rstd) {
  CheckStorage(x, options.precision);
  const int64_t h = LastDimension(x);
  WithType(x.dtype, [&]<class T>(T) {
    LaunchNormForward<T, false>(
        context, {PointerOf<T>(x), PointerOf<T>(gamma), nullptr, x.size() / h, static_cast<int>(h), options.epsilon,
                  options.gamma_offset, PointerOf<T>(y), nullptr, PointerOf<float>(rstd), PointerOf<float>(options.amax)});
  });
}

void AddForwardCuda(const Context& context, const Tensor& x, const Tensor& residual, const Tensor& gamma,
                    const NormOptions& options, const Tensor& hidden, const Tensor& y, const Tensor& rstd) {
  CheckStorage(x, options.precision);
  const int64_t h = LastDimension(x);
  WithType(x.dtype, [&]<class T>(T) {
    LaunchNormForward<T, false, true>(
        context, {PointerOf<T>(x), PointerOf<T>(gamma), nullptr, x.size() / h, static_cast<int>(h), options.epsilon,
                  options.gamma_offset, PointerOf<T>(y), nullptr, PointerOf<float>(rstd), PointerOf<float>(options.amax),
                  PointerOf<T>(residual), PointerOf<T>(hidden)});
  });
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& rstd,
                  const Tensor& d_residual, const NormOptions& options, const Tensor& dx, const Tensor& gamma_grad) {
  CheckStorage(x, options.precision);
  const int64_t h = LastDimension(x);
  WithType(x.dtype, [&]<class T>(T) {
    LaunchNormBackward<T, false>(
        context,
        {PointerOf<T>(dy), PointerOf<T>(x), PointerOf<T>(gamma), nullptr, PointerOf<float>(rstd), PointerOf<T>(d_residual),
         x.size() / h, static_cast<int>(h), options.gamma_offset, PointerOf<T>(dx), nullptr, PointerOf<float>(options.amax)},
        {{PointerOf<float>(gamma_grad), nullptr}});
  });
}

const bool g_registered =
    (RmsNormForward.cuda = &ForwardCuda, AddRmsNormForward.cuda = &AddForwardCuda, RmsNormBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
