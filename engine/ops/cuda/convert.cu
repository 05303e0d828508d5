#include "engine/ops/convert.h"

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {
namespace {

template <class A, class B> __global__ void ConvertKernel(const A* from, B* to, int64_t count, DType precision) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = Narrow<B>(RoundTo(precision, Widen(from[i])));
  }
}

void ConvertCuda(const Context& context, const Tensor& from, DType precision, const Tensor& to) {
  const int64_t count = from.size();
  if (to.size() != count) ThrowEngineError("conversion of {} elements into {}", count, to.size());
  if (count == 0 || (from.data == to.data && from.dtype == precision)) return;  // Already rounded.
  WithType(from.dtype, [&]<class A>(A) {
    WithType(to.dtype, [&]<class B>(B) {
      ConvertKernel<<<GridOf(count, 256), 256, 0, StreamOf(context)>>>(static_cast<const A*>(from.data), static_cast<B*>(to.data),
                                                                       count, precision);
    });
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (Convert.cuda = &ConvertCuda, true);

}  // namespace
}  // namespace mbridge::cuda
