#include "engine/ops/attention_sinks.h"

#include "engine/ops/cuda/sink_gradients.h"
#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

constexpr int kWarps = 8;  // Of a block, each with one row of a head.

// Row `index` of context [s, b, heads, size] belongs to head index % heads of sample index / heads % b; where it stands in
// [b, heads, s].
__device__ __forceinline__ int64_t PlaceOf(int64_t index, int64_t s, int64_t batch, int64_t heads) {
  return index % (heads * batch) * s + index / (heads * batch);
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps) AddSinksKernel(const T* scores, int64_t s, int64_t batch, int64_t heads,
                                                              int64_t size, float* stats, T* context, float* rows) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, place = PlaceOf(index, s, batch, heads);
  if (index >= s * batch * heads) return;
  const float old = stats[place], sink = Widen(scores[index % heads]);
  const float normaliser = fmaxf(old, sink) + log1pf(expf(-fabsf(old - sink))), factor = expf(old - normaliser);
  T* row = context + index * size;
  for (int64_t j = threadIdx.x % 32; j < size; j += 32) row[j] = Narrow<T>(Widen(row[j]) * factor);
  __syncwarp();
  if (threadIdx.x % 32 > 0) return;
  stats[place] = normaliser;
  rows[place] = expf(sink - normaliser);
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    RowGradientsKernel(const T* d_context, const T* context, int64_t s, int64_t batch, int64_t heads, int64_t size, float* rows) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= s * batch * heads) return;
  const T *grad = d_context + index * size, *row = context + index * size;
  float sum = 0.0f;
  for (int64_t j = threadIdx.x % 32; j < size; j += 32) sum += Widen(grad[j]) * Widen(row[j]);
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) rows[PlaceOf(index, s, batch, heads)] *= -sum;
}

struct Shapes {
  int64_t s, batch, heads, size;
  unsigned blocks() const { return static_cast<unsigned>((s * batch * heads + kWarps - 1) / kWarps); }
};

Shapes ShapesOf(const AttentionSinks& sinks, const Tensor& context) {
  const Shape& rows = sinks.probabilities.shape;
  const int64_t heads = sinks.scores.size();
  if (rows.rank() != 3 || rows[1] != heads || context.shape.rank() != 3 || context.shape[0] != rows[2] ||
      context.shape[1] != rows[0] || context.shape[2] % heads != 0 || sinks.scores.dtype != context.dtype) {
    ThrowEngineError("sinks of {} heads, rows {}, for a context {}", heads, rows.ToString(), context.shape.ToString());
  }
  return {rows[2], rows[0], heads, context.shape[2] / heads};
}

void AddSinks(const Context& context, const AttentionSinks& sinks, const Tensor& stats, const Tensor& output) {
  const Shapes x = ShapesOf(sinks, output);
  WithType(output.dtype, [&]<class T>(T) {
    AddSinksKernel<<<x.blocks(), 32 * kWarps, 0, StreamOf(context)>>>(PointerOf<const T>(sinks.scores), x.s, x.batch, x.heads,
                                                                      x.size, PointerOf<float>(stats), PointerOf<T>(output),
                                                                      PointerOf<float>(sinks.probabilities));
  });
  MB_CUDA_LAUNCHED();
}

void SinkGradients(const Context& context, const Tensor& d_output, const Tensor& output, DType precision,
                   const AttentionSinks& sinks) {
  CheckStorage(output, precision);
  const Shapes x = ShapesOf(sinks, output);
  WithType(output.dtype, [&]<class T>(T) {
    RowGradientsKernel<<<x.blocks(), 32 * kWarps, 0, StreamOf(context)>>>(PointerOf<const T>(d_output),
                                                                          PointerOf<const T>(output), x.s, x.batch, x.heads,
                                                                          x.size, PointerOf<float>(sinks.probabilities));
    MB_CUDA_LAUNCHED();
    AddSinkGradients<T>(context, sinks, x.batch, x.s);
  });
}

const bool g_registered = (AddSinksToFlash.cuda = &AddSinks, FlashSinkGradients.cuda = &SinkGradients, true);

}  // namespace
}  // namespace mbridge::cuda
