// The end of both attentions' backward passes: sums of what the rows have left for each head's sink.
#pragma once

#include "engine/ops/attention.h"
#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {

template <class T>
__global__ void __launch_bounds__(256)
    SinkSumsKernel(const float* rows, int64_t batch, int64_t s, int64_t heads, float* gradient) {
  __shared__ float shared[32];
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < batch * s; i += blockDim.x) sum += rows[(i / s * heads + blockIdx.x) * s + i % s];
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) gradient[blockIdx.x] += Round<T>(sum);
}

// sinks.gradient[head] += round to T(sum over samples and rows of sinks.probabilities [batch, heads, s]).
template <class T> void AddSinkGradients(const Context& context, const AttentionSinks& sinks, int64_t batch, int64_t s) {
  const int64_t heads = sinks.scores.size();
  SinkSumsKernel<T><<<static_cast<unsigned>(heads), 256, 0, StreamOf(context)>>>(sinks.probabilities.as<float>(), batch, s, heads,
                                                                                 sinks.gradient.as<float>());
  MB_CUDA_LAUNCHED();
}

}  // namespace mbridge::cuda
