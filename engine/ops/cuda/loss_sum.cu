#include "engine/ops/loss_sum.h"

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 1024;

// Sum over the block of kThreads, in thread 0. `shared` holds 32 doubles.
__device__ double SumInFirstThread(double x, double* shared) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) x += shared[warp];
  }
  return x;
}

// One block. per_token = grad_scale / max(sum of mask, 1).
__global__ void __launch_bounds__(kThreads) PerTokenKernel(const float* mask, int64_t count, float grad_scale, float* per_token) {
  __shared__ double shared[32];
  double tokens = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kThreads) tokens += mask[i];
  tokens = SumInFirstThread(tokens, shared);
  if (threadIdx.x == 0) *per_token = __fdiv_rn(grad_scale, static_cast<float>(fmax(tokens, 1.0)));
}

__global__ void TargetsKernel(const int32_t* labels, const float* mask, uint32_t batch, uint32_t sequence, const float* per_token,
                              int32_t* labels_out, float* weight) {
  const uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= batch * sequence) return;
  const uint32_t from = row % batch * sequence + row / batch;
  labels_out[row] = labels[from];
  weight[row] = mask[from] * *per_token;
}

void SetTargetsCuda(const Context& context, const Tensor& labels, const Tensor& mask, float grad_scale, const Tensor& labels_out,
                    const Tensor& weight) {
  const int64_t count = mask.size();
  if (count == 0) return;
  if (count > INT32_MAX) ThrowEngineError("targets of {} tokens", count);
  float* per_token = WorkspaceOf<float>(context, 1);
  const float* m = static_cast<const float*>(mask.data);
  PerTokenKernel<<<1, kThreads, 0, StreamOf(context)>>>(m, count, grad_scale, per_token);
  MB_CUDA_LAUNCHED();
  TargetsKernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, StreamOf(context)>>>(
      static_cast<const int32_t*>(labels.data), m, static_cast<uint32_t>(mask.shape[0]), static_cast<uint32_t>(mask.shape[1]),
      per_token, static_cast<int32_t*>(labels_out.data), static_cast<float*>(weight.data));
  MB_CUDA_LAUNCHED();
}

// One block.
__global__ void __launch_bounds__(kThreads)
    SumsKernel(const float* loss, const float* mask, uint32_t batch, uint32_t sequence, double* totals) {
  __shared__ double shared[32];
  double losses = 0, tokens = 0;
#pragma unroll 4
  for (uint32_t row = threadIdx.x; row < batch * sequence; row += kThreads) {
    const float m = mask[row % batch * sequence + row / batch];
    losses += static_cast<double>(loss[row] * m);
    tokens += m;
  }
  losses = SumInFirstThread(losses, shared);
  tokens = SumInFirstThread(tokens, shared);
  if (threadIdx.x != 0) return;
  totals[0] += static_cast<float>(losses);
  totals[1] += tokens;
}

void AddLossSumsCuda(const Context& context, const Tensor& loss, const Tensor& mask, const Tensor& totals) {
  if (mask.size() == 0) return;
  if (mask.size() > INT32_MAX) ThrowEngineError("losses of {} tokens", mask.size());
  SumsKernel<<<1, kThreads, 0, StreamOf(context)>>>(static_cast<const float*>(loss.data), static_cast<const float*>(mask.data),
                                                    static_cast<uint32_t>(mask.shape[0]), static_cast<uint32_t>(mask.shape[1]),
                                                    static_cast<double*>(totals.data));
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (SetTargets.cuda = &SetTargetsCuda, AddLossSums.cuda = &AddLossSumsCuda, true);

}  // namespace
}  // namespace mbridge::cuda
