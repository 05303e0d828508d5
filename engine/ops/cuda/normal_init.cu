#include <curand_kernel.h>

#include "engine/ops/cuda/launch.h"
#include "engine/ops/normal_init.h"

namespace mbridge::cuda {
namespace {

// The grid and the order of draws are those of ATen's native/cuda/DistributionTemplates.h: element (4 l + i) threads + t gets
// number i of thread t's draw l. Sine, cosine and logarithm are those that cuRAND's own code compiles to.
template <class T>
__global__ void __launch_bounds__(256)
    NormalKernel(uint64_t seed, uint64_t offset, int64_t count, float mean, float std, T* out) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, threads = int64_t{gridDim.x} * blockDim.x;
  curandStatePhilox4_32_10_t state;
  curand_init(seed, static_cast<unsigned long long>(thread), offset, &state);
  for (int64_t first = thread; first < count; first += 4 * threads) {
    const float4 draws = curand_normal4(&state);
    const float values[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t element = first + i * threads;
      if (element < count) out[element] = Narrow<T>(values[i] * std + mean);
    }
  }
}

void DrawNormalCuda(const Context& context, PhiloxStream position, int sm_count, float mean, float std, const Tensor& out) {
  const int64_t count = out.size();
  if (count == 0) return;
  const auto grid = static_cast<unsigned>(CudaDrawThreads(count, sm_count) / 256);
  WithType(out.dtype, [&]<class T>(T) {
    NormalKernel<<<grid, 256, 0, StreamOf(context)>>>(position.seed, position.offset, count, mean, std,
                                                      static_cast<T*>(out.data));
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (DrawNormal.cuda = &DrawNormalCuda, true);

}  // namespace
}  // namespace mbridge::cuda
