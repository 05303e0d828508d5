// Layer norm and RMS norm over rows: a warp or a block keeps a row in registers, so that each value is read once and written
// once. Backward sums the parameters' gradients in the same pass, a partial row per block.
#pragma once

#include "engine/ops/cuda/column_sums.h"
#include "engine/ops/cuda/maximum.h"

namespace mbridge::cuda {

template <class T> struct NormForwardArgs {
  const T *x, *gamma, *beta;  // beta: layer norm only.
  int64_t rows;
  int h;
  float epsilon, gamma_offset;
  T* y;
  float *mean, *rstd;  // mean: layer norm only.
  float* amax;         // Null, or raised to the largest |y|.
};

// Sum over the group that shares a row.
template <bool kWarp> __device__ __forceinline__ float GroupSum(float x, float* shared) {
  if constexpr (kWarp) return WarpSum(x);
  return BlockSum(x, shared);
}

// kHold vectors a thread. kWarp: a warp a row, else a block a row.
template <class T, bool kLayer, int kHold, bool kWarp>
__global__ void __launch_bounds__(kWarp ? 256 : 1024) NormForwardKernel(const NormForwardArgs<T> a) {
  constexpr int kN = kVectorSize<T>;
  __shared__ float shared[32];
  const int lane = kWarp ? threadIdx.x % 32 : threadIdx.x, group = kWarp ? 32 : blockDim.x, vectors = a.h / kN;
  const int64_t row = kWarp ? int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32 : int64_t{blockIdx.x};
  if (row >= a.rows) return;  // Whole warps, or the whole block.
  const T* x = a.x + row * a.h;
  Pack<T, kN> in[kHold];
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (lane + k * group < vectors) in[k] = LoadPack<kN>(x + (lane + k * group) * kN);
  }
  float mean = 0.0f;
  if constexpr (kLayer) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * group >= vectors) continue;
      float values[kN];
      Unpack(in[k], values);
#pragma unroll
      for (int i = 0; i < kN; ++i) sum += values[i];
    }
    mean = GroupSum<kWarp>(sum, shared) / static_cast<float>(a.h);
  }
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (lane + k * group >= vectors) continue;
    float values[kN];
    Unpack(in[k], values);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float d = values[i] - mean;
      squares += d * d;
    }
  }
  squares = GroupSum<kWarp>(squares, shared);
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.h) + a.epsilon);
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    const int column = (lane + k * group) * kN;
    if (column >= a.h) continue;
    float values[kN], gamma[kN], beta[kN] = {};
    Unpack(in[k], values);
    LoadFloats<kN>(a.gamma + column, gamma);
    if constexpr (kLayer) LoadFloats<kN>(a.beta + column, beta);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      values[i] = (values[i] - mean) * rstd * (gamma[i] + a.gamma_offset) + beta[i];
      largest = fmaxf(largest, fabsf(values[i]));
    }
    StoreFloats<kN>(a.y + row * a.h + column, values);
  }
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
  if (lane == 0) {
    if constexpr (kLayer) a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
}

// Any width and alignment: a block a row, three passes.
template <class T, bool kLayer> __global__ void __launch_bounds__(256) NormForwardAnyKernel(const NormForwardArgs<T> a) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const T* x = a.x + row * a.h;
  float mean = 0.0f;
  if constexpr (kLayer) {
    float sum = 0.0f;
    for (int j = threadIdx.x; j < a.h; j += blockDim.x) sum += Widen(x[j]);
    mean = BlockSum(sum, shared) / static_cast<float>(a.h);
  }
  float squares = 0.0f;
  for (int j = threadIdx.x; j < a.h; j += blockDim.x) {
    const float d = Widen(x[j]) - mean;
    squares += d * d;
  }
  const float rstd = 1.0f / sqrtf(BlockSum(squares, shared) / static_cast<float>(a.h) + a.epsilon);
  float largest = 0.0f;
  for (int j = threadIdx.x; j < a.h; j += blockDim.x) {
    const float beta = kLayer ? Widen(a.beta[j]) : 0.0f;
    const float y = (Widen(x[j]) - mean) * rstd * (Widen(a.gamma[j]) + a.gamma_offset) + beta;
    a.y[row * a.h + j] = Narrow<T>(y);
    largest = fmaxf(largest, fabsf(y));
  }
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
  if (threadIdx.x == 0) {
    if constexpr (kLayer) a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
}

// f(vectors a thread holds): 1 or 2 (4 with kFour); false where a row is too wide for `max_threads` of them.
template <bool kFour, class F> bool WithHold(int64_t vectors, int64_t max_threads, F&& f) {
  if (vectors <= std::min<int64_t>(512, max_threads)) return f(std::integral_constant<int, 1>()), true;
  if (vectors <= 2 * max_threads) return f(std::integral_constant<int, 2>()), true;
  if constexpr (kFour) {
    if (vectors <= 4 * max_threads) return f(std::integral_constant<int, 4>()), true;
  }
  return false;
}

// f(vectors a lane holds where a warp has a row): at most kMost of them; false for wider rows.
template <int kMost, class F> bool WithWarpHold(int64_t vectors, F&& f) {
  if (vectors <= 32) return f(std::integral_constant<int, 1>()), true;
  if (vectors <= 64) return f(std::integral_constant<int, 2>()), true;
  if constexpr (kMost < 16) {
    if (vectors <= 96) return f(std::integral_constant<int, 3>()), true;
  }
  if (vectors <= 128) return f(std::integral_constant<int, 4>()), true;
  if constexpr (kMost >= 16) {
    if (vectors <= 256) return f(std::integral_constant<int, 8>()), true;
    if (vectors <= 512) return f(std::integral_constant<int, 16>()), true;
  }
  return false;
}

inline unsigned ThreadsFor(int64_t vectors, int hold) {
  return static_cast<unsigned>(((vectors + hold - 1) / hold + 31) / 32 * 32);
}

template <class T, bool kLayer> void LaunchNormForward(const Context& context, const NormForwardArgs<T>& a) {
  if (a.rows == 0) return;
  const cudaStream_t stream = StreamOf(context);
  const int64_t vectors = a.h / kVectorSize<T>;
  const bool aligned = a.h % kVectorSize<T> == 0 && AreAligned16(a.x, a.gamma, a.beta, a.y);
  if (a.rows > INT32_MAX) ThrowEngineError("norm over {} rows", a.rows);
  const auto rows = static_cast<unsigned>(a.rows);
  bool done = false;
  constexpr int kMostHeld = sizeof(T) == 2 ? 16 : 4;
  if (aligned && vectors <= 32 * kMostHeld) {
    done = WithWarpHold<kMostHeld>(vectors, [&]<int kHold>(std::integral_constant<int, kHold>) {
      NormForwardKernel<T, kLayer, kHold, true><<<(rows + 7) / 8, 256, 0, stream>>>(a);
    });
  } else if (aligned) {
    done = WithHold<true>(vectors, 1024, [&]<int kHold>(std::integral_constant<int, kHold>) {
      NormForwardKernel<T, kLayer, kHold, false><<<rows, ThreadsFor(vectors, kHold), 0, stream>>>(a);
    });
  }
  if (!done) NormForwardAnyKernel<T, kLayer><<<rows, 256, 0, stream>>>(a);
  MB_CUDA_LAUNCHED();
}

template <class T> struct NormBackwardArgs {
  const T *dy, *x, *gamma;
  const float *mean, *rstd;  // mean: layer norm only.
  const T* residual;         // Null for none.
  int64_t rows;
  int h;
  float gamma_offset;
  T* dx;
  float* partials;  // [blocks, gamma's and beta's, h]
  float* amax;      // Null, or raised to the largest |dx|.
};

// The input gradient from its parts, in the CPU twin's order.
template <class T>
__device__ __forceinline__ float InputGradient(float dy, float gamma, float normal, float mean_t, float mean_dot, float rstd) {
  return Round<T>(rstd * (dy * gamma - mean_t - normal * mean_dot));
}

// Two sums over the block with one barrier; `shared` holds 32 pairs and must be another one at the next call.
__device__ __forceinline__ float2 BlockSums(float x, float y, float2* shared) {
  x = WarpSum(x);
  y = WarpSum(y);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = {x, y};
  __syncthreads();
  const float2 part = threadIdx.x % 32 < (blockDim.x + 31) / 32 ? shared[threadIdx.x % 32] : float2{};
  return {WarpSum(part.x), WarpSum(part.y)};
}

// Blocks of 256 threads that share a multiprocessor's registers where a warp has a row.
template <bool kLayer, int kHold> inline constexpr int kNormBackwardBlocks = kHold == 1 ? 4 : kHold < 4 || !kLayer ? 2 : 1;

// What a thread holds of a row.
template <class T, int kHold> struct NormBackwardRow {
  Pack<T, kVectorSize<T>> dy[kHold], x[kHold], residual[kHold];
  float mean, rstd;
};

// Blocks walk over rows, the last first, since the product before left those in the L2 cache, and keep their columns' parameter
// gradients in registers. kWarp: a warp a row; else a block a row, which loads the next row before it sums over this one.
template <class T, bool kLayer, int kHold, bool kWarp>
__global__ void __launch_bounds__(kWarp ? 256 : 512, kWarp ? kNormBackwardBlocks<kLayer, kHold> : 1)
    NormBackwardKernel(const NormBackwardArgs<T> a) {
  constexpr int kN = kVectorSize<T>, kSums = kLayer ? 2 : 1, kWarps = 8;
  __shared__ float2 shared[2][32];
  const int lane = kWarp ? threadIdx.x % 32 : threadIdx.x, group = kWarp ? 32 : blockDim.x, vectors = a.h / kN;
  const float width = static_cast<float>(a.h);
  Pack<T, kN> scale[kHold];
  float sums[kSums][kHold][kN] = {};
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (lane + k * group < vectors) scale[k] = LoadPack<kN>(a.gamma + (lane + k * group) * kN);
  }
  const auto load = [&](int64_t row) {
    NormBackwardRow<T, kHold> loaded;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * group >= vectors) continue;
      const int64_t at = row * a.h + (lane + k * group) * kN;
      loaded.dy[k] = LoadPack<kN>(a.dy + at);
      loaded.x[k] = LoadPack<kN>(a.x + at);
      if (a.residual != nullptr) loaded.residual[k] = LoadPack<kN>(a.residual + at);
    }
    loaded.mean = kLayer ? a.mean[row] : 0.0f;
    loaded.rstd = a.rstd[row];
    return loaded;
  };
  const int64_t stride = int64_t{gridDim.x} * (kWarp ? kWarps : 1);
  int64_t row = a.rows - 1 - (kWarp ? int64_t{blockIdx.x} * kWarps + threadIdx.x / 32 : int64_t{blockIdx.x});
  NormBackwardRow<T, kHold> current;
  float largest = 0.0f;
  if (row >= 0) current = load(row);
  for (int turn = 0; row >= 0; turn ^= 1) {
    const int64_t next_row = row - stride;
    NormBackwardRow<T, kHold> next;
    if constexpr (!kWarp) {
      if (next_row >= 0) next = load(next_row);
    }
    const float mean = current.mean, rstd = current.rstd;
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * group >= vectors) continue;
      float d[kN], values[kN], gamma[kN];
      Unpack(current.dy[k], d);
      Unpack(current.x[k], values);
      Unpack(scale[k], gamma);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float normal = (values[i] - mean) * rstd, t = d[i] * (gamma[i] + a.gamma_offset);
        dot += t * normal;
        sums[0][k][i] += d[i] * normal;
        if constexpr (kLayer) {
          sum += t;
          sums[1][k][i] += d[i];
        }
      }
    }
    if constexpr (kWarp) {
      dot = WarpSum(dot);
      if constexpr (kLayer) sum = WarpSum(sum);
    } else {
      const float2 both = BlockSums(dot, sum, shared[turn]);
      dot = both.x;
      sum = both.y;
    }
    const float mean_dot = dot / width, mean_t = kLayer ? sum / width : 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * group >= vectors) continue;
      float d[kN], values[kN], gamma[kN], out[kN];
      Unpack(current.dy[k], d);
      Unpack(current.x[k], values);
      Unpack(scale[k], gamma);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        out[i] = InputGradient<T>(d[i], gamma[i] + a.gamma_offset, (values[i] - mean) * rstd, mean_t, mean_dot, rstd);
      }
      if (a.residual != nullptr) {
        float r[kN];
        Unpack(current.residual[k], r);
#pragma unroll
        for (int i = 0; i < kN; ++i) out[i] += r[i];
      }
#pragma unroll
      for (int i = 0; i < kN; ++i) largest = fmaxf(largest, fabsf(out[i]));
      StoreFloats<kN>(a.dx + row * a.h + (lane + k * group) * kN, out);
    }
    if constexpr (!kWarp) {
      current = next;
    } else {
      if (next_row >= 0) current = load(next_row);
    }
    row = next_row;
  }
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
  // A row of partial sums a block; those of its warps are joined first.
  if constexpr (kWarp) {
    constexpr int kWidth = 32 * kHold * kN;
    __shared__ alignas(16) float joined[kWarps][kWidth];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int k = 0; k < kHold; ++k) StoreFloats<kN>(&joined[threadIdx.x / 32][(lane + k * 32) * kN], sums[s][k]);
      __syncthreads();
      for (int column = threadIdx.x; column < a.h; column += blockDim.x) {
        float total = joined[0][column];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) total += joined[w][column];
        a.partials[(int64_t{blockIdx.x} * kSums + s) * a.h + column] = total;
      }
      __syncthreads();
    }
  } else {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        const int vector = lane + k * group;
        if (vector < vectors) StoreFloats<kN>(a.partials + (int64_t{blockIdx.x} * kSums + s) * a.h + vector * kN, sums[s][k]);
      }
    }
  }
}

template <class T, bool kLayer> __global__ void __launch_bounds__(256) NormBackwardAnyKernel(const NormBackwardArgs<T> a) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x, begin = row * a.h;
  const float mean = kLayer ? a.mean[row] : 0.0f, rstd = a.rstd[row], width = static_cast<float>(a.h);
  float sum = 0.0f, dot = 0.0f;
  for (int j = threadIdx.x; j < a.h; j += blockDim.x) {
    const float t = Widen(a.dy[begin + j]) * (Widen(a.gamma[j]) + a.gamma_offset);
    sum += t;
    dot += t * ((Widen(a.x[begin + j]) - mean) * rstd);
  }
  const float mean_dot = BlockSum(dot, shared) / width;
  const float mean_t = kLayer ? BlockSum(sum, shared) / width : 0.0f;
  float largest = 0.0f;
  for (int j = threadIdx.x; j < a.h; j += blockDim.x) {
    const float normal = (Widen(a.x[begin + j]) - mean) * rstd;
    const float d = InputGradient<T>(Widen(a.dy[begin + j]), Widen(a.gamma[j]) + a.gamma_offset, normal, mean_t, mean_dot, rstd);
    const float dx = a.residual == nullptr ? d : Widen(a.residual[begin + j]) + d;
    a.dx[begin + j] = Narrow<T>(dx);
    largest = fmaxf(largest, fabsf(dx));
  }
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
}

// Parameter gradients alone, for rows that do not fit the registers.
template <class T, bool kLayer, int kWidth> struct NormSumsBody {
  static constexpr int kN = kWidth, kSums = kLayer ? 2 : 1;
  struct Row {
    Pack<T, kN> dy, x;
    float mean, rstd;
  };
  const T *dy, *x;
  const float *mean, *rstd;
  int64_t n;

  __device__ Row Load(int64_t row, int64_t column) const {
    return {LoadPack<kN>(dy + row * n + column), LoadPack<kN>(x + row * n + column), kLayer ? mean[row] : 0.0f, rstd[row]};
  }
  __device__ void Add(const Row& loaded, int64_t, int64_t, float (&sums)[kSums][kN]) const {
    float d[kN], values[kN];
    Unpack(loaded.dy, d);
    Unpack(loaded.x, values);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      sums[0][i] += d[i] * ((values[i] - loaded.mean) * loaded.rstd);
      if constexpr (kLayer) sums[1][i] += d[i];
    }
  }
};

// outputs: gamma's gradient, then beta's.
template <class T, bool kLayer>
void LaunchNormBackward(const Context& context, NormBackwardArgs<T> a, const ColumnOutputs& outputs) {
  constexpr int kN = kVectorSize<T>, kSums = kLayer ? 2 : 1;
  if (a.rows == 0) return;
  if (a.rows > INT32_MAX) ThrowEngineError("norm over {} rows", a.rows);
  const cudaStream_t stream = StreamOf(context);
  const bool aligned = a.h % kN == 0 && AreAligned16(a.dy, a.x, a.gamma, a.residual, a.dx);
  const int64_t vectors = a.h / kN;
  int64_t blocks = 0;
  const auto run = [&](auto* kernel, int64_t wanted, unsigned threads) {
    blocks = wanted;
    a.partials = WorkspaceOf<float>(context, blocks * kSums * a.h);
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(a);
    MB_CUDA_LAUNCHED();
  };
  bool done = false;
  if (aligned && vectors <= 128) {
    done = WithWarpHold<4>(vectors, [&]<int kHold>(std::integral_constant<int, kHold>) {
      run(&NormBackwardKernel<T, kLayer, kHold, true>,
          std::min<int64_t>((a.rows + 7) / 8, 132 * kNormBackwardBlocks<kLayer, kHold>), 256);
    });
  } else if (aligned) {
    done = WithHold<false>(vectors, 512, [&]<int kHold>(std::integral_constant<int, kHold>) {
      const unsigned threads = ThreadsFor(vectors, kHold);
      run(&NormBackwardKernel<T, kLayer, kHold, false>, std::min<int64_t>(a.rows, 132 * std::clamp<int64_t>(768 / threads, 1, 4)),
          threads);
    });
  }
  if (done) {
    FinishColumns<T, kSums>(context, a.partials, blocks, a.h, outputs);
    return;
  }
  // Before dx overwrites dy.
  SumColumns<T>(context, NormSumsBody<T, kLayer, 1>{a.dy, a.x, a.mean, a.rstd, a.h}, a.rows, a.h, outputs);
  NormBackwardAnyKernel<T, kLayer><<<static_cast<unsigned>(a.rows), 256, 0, stream>>>(a);
  MB_CUDA_LAUNCHED();
}

}  // namespace mbridge::cuda
