#include "engine/ops/vocab_cross_entropy.h"

#include "engine/ops/cuda/online_softmax.h"

namespace mbridge::cuda {
namespace {

struct State {
  float *maximum, *sum, *predicted;
};
State StateOf(const CrossEntropyState& state) {
  return {PointerOf<float>(state.maximum), PointerOf<float>(state.sum), PointerOf<float>(state.predicted)};
}

__global__ void BeginKernel(const State state, int64_t rows) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  state.maximum[i] = -INFINITY;
  state.sum[i] = 0.0f;
  state.predicted[i] = 0.0f;
}

__global__ void LossKernel(const State state, int64_t rows, float* loss) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < rows) loss[i] = logf(state.sum[i]) - (state.predicted[i] - state.maximum[i]);
}

__global__ void RescaleKernel(const State state, const float* largest, int64_t rows) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  const float maximum = state.maximum[i], to = largest[i];
  if (maximum != to) state.sum[i] *= expf(maximum - to);
  state.maximum[i] = to;
}

unsigned RowBlocks(int64_t rows) { return static_cast<unsigned>((rows + 255) / 256); }

void BeginCuda(const Context& context, const CrossEntropyState& state) {
  const int64_t rows = state.maximum.size();
  if (rows == 0) return;
  BeginKernel<<<RowBlocks(rows), 256, 0, StreamOf(context)>>>(StateOf(state), rows);
  MB_CUDA_LAUNCHED();
}

void RescaleCuda(const Context& context, const CrossEntropyState& state, const Tensor& largest) {
  const int64_t rows = largest.size();
  if (rows == 0) return;
  RescaleKernel<<<RowBlocks(rows), 256, 0, StreamOf(context)>>>(StateOf(state), PointerOf<float>(largest), rows);
  MB_CUDA_LAUNCHED();
}

void LossCuda(const Context& context, const CrossEntropyState& state, const Tensor& loss) {
  const int64_t rows = loss.size();
  if (rows == 0) return;
  LossKernel<<<RowBlocks(rows), 256, 0, StreamOf(context)>>>(StateOf(state), rows, PointerOf<float>(loss));
  MB_CUDA_LAUNCHED();
}

// T: the tile's storage; P: the logits' precision, which they are kept in. A block a row.
template <class T, class P, int kN>
__global__ void __launch_bounds__(512) FoldKernel(const T* tile, int64_t stride, int64_t first, int64_t n, const int32_t* labels,
                                                  const State state, P* logits, int64_t kept_stride) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const T* z = tile + row * stride;
  P* kept = logits == nullptr ? nullptr : logits + row * kept_stride + first;
  OnlineSoftmax<P> online;
  const auto fold = [&]<int kWidth>(std::integral_constant<int, kWidth>, int64_t column, float(&values)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = Round<P>(values[i]);
    if (kept != nullptr) StoreFloats<kWidth>(kept + column, values);
    online.Add(values);
  };
  const int64_t whole = n / kN * kN;
  for (int64_t column = int64_t{threadIdx.x} * kN; column < whole; column += int64_t{blockDim.x} * kN) {
    float values[kN];
    LoadFloats<kN>(z + column, values);
    fold(std::integral_constant<int, kN>(), column, values);
  }
  if (whole + threadIdx.x < n) {
    float value[1] = {Widen(z[whole + threadIdx.x])};
    fold(std::integral_constant<int, 1>(), whole + threadIdx.x, value);
  }
  online.Join(shared);
  if (threadIdx.x != 0) return;
  const float before = state.maximum[row], largest = fmaxf(before, online.maximum);
  const float old_sum = state.sum[row] * (before == largest ? 1.0f : ExpFor<P>(before - largest));
  const float new_sum = online.sum * (online.maximum == largest ? 1.0f : ExpFor<P>(online.maximum - largest));
  state.maximum[row] = largest;
  state.sum[row] = old_sum + new_sum;
  const int64_t hit = labels[row] - first;
  if (hit >= 0 && hit < n) state.predicted[row] = Round<P>(Widen(z[hit]));
}

void FoldCuda(const Context& context, const Tensor& tile, int64_t first, int64_t n, const Tensor& labels, DType precision,
              const CrossEntropyState& state, const Tensor& logits) {
  const int64_t rows = labels.size(), stride = tile.shape[1], kept_stride = logits.empty() ? 0 : logits.shape[1];
  if (tile.dtype != precision && tile.dtype != DType::kF32) {
    ThrowEngineError("no CUDA cross entropy of {} logits rounded to {}", NameOf(tile.dtype), NameOf(precision));
  }
  if (rows == 0 || n == 0) return;
  WithType(tile.dtype, [&]<class T>(T) {
    WithType(precision, [&]<class P>(P) {
      if constexpr (std::is_same_v<T, float> || std::is_same_v<T, P>) {
        const T* values = PointerOf<T>(tile);
        P* kept = PointerOf<P>(logits);
        const auto run = [&]<int kN>(std::integral_constant<int, kN>) {
          FoldKernel<T, P, kN><<<static_cast<unsigned>(rows), 512, 0, StreamOf(context)>>>(
              values, stride, first, n, PointerOf<int32_t>(labels), StateOf(state), kept, kept_stride);
        };
        constexpr int kN = kVectorSize<T>;
        if (stride % kN == 0 && first % kN == 0 && kept_stride % kN == 0 && AreAligned16(values, kept)) {
          run(std::integral_constant<int, kN>());
        } else {
          run(std::integral_constant<int, 1>());
        }
      }
    });
  });
  MB_CUDA_LAUNCHED();
}

// T: the tile's storage; K: the kept logits'.
template <class T, class K, int kN>
__global__ void __launch_bounds__(512)
    GradientKernel(const K* logits, int64_t kept_stride, int64_t first, int64_t n, const int32_t* labels, const float* weights,
                   const State state, DType gradient_precision, T* tile, int64_t stride) {
  const int64_t row = blockIdx.x;
  const K* z = logits + row * kept_stride + first;
  T* out = tile + row * stride;
  const float maximum = state.maximum[row], inverse = 1.0f / state.sum[row], weight = weights[row];
  const int64_t hit = labels[row] - first;
  const auto gradient = [&]<int kWidth>(std::integral_constant<int, kWidth>, int64_t column) {
    float values[kWidth];
    LoadFloats<kWidth>(z + column, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float softmax = ExpFor<K>(values[i] - maximum) * inverse;
      values[i] = RoundTo(gradient_precision, (column + i == hit ? softmax - 1.0f : softmax) * weight);
    }
    StoreFloats<kWidth>(out + column, values);
  };
  const int64_t whole = n / kN * kN;
  for (int64_t column = int64_t{threadIdx.x} * kN; column < whole; column += int64_t{blockDim.x} * kN) {
    gradient(std::integral_constant<int, kN>(), column);
  }
  if (whole + threadIdx.x < n) gradient(std::integral_constant<int, 1>(), whole + threadIdx.x);
}

void GradientCuda(const Context& context, const Tensor& logits, int64_t first, int64_t n, const Tensor& labels,
                  const Tensor& weight, const CrossEntropyState& state, DType gradient_precision, const Tensor& tile) {
  const int64_t rows = labels.size(), stride = tile.shape[1], kept_stride = logits.shape[1];
  if (rows == 0 || n == 0) return;
  WithType(tile.dtype, [&]<class T>(T) {
    WithType(logits.dtype, [&]<class K>(K) {
      const K* kept = PointerOf<K>(logits);
      T* out = PointerOf<T>(tile);
      const auto run = [&]<int kN>(std::integral_constant<int, kN>) {
        GradientKernel<T, K, kN><<<static_cast<unsigned>(rows), 512, 0, StreamOf(context)>>>(
            kept, kept_stride, first, n, PointerOf<int32_t>(labels), PointerOf<float>(weight), StateOf(state), gradient_precision,
            out, stride);
      };
      constexpr int kN = std::min(kVectorSize<T>, kVectorSize<K>);
      if (stride % kN == 0 && first % kN == 0 && kept_stride % kN == 0 && AreAligned16(kept, out)) {
        run(std::integral_constant<int, kN>());
      } else {
        run(std::integral_constant<int, 1>());
      }
    });
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered =
    (CrossEntropyBegin.cuda = &BeginCuda, CrossEntropyFold.cuda = &FoldCuda, CrossEntropyRescale.cuda = &RescaleCuda,
     CrossEntropyLoss.cuda = &LossCuda, CrossEntropyGradient.cuda = &GradientCuda, true);

}  // namespace
}  // namespace mbridge::cuda
