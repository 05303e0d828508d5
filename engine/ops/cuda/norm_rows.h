// Layer norm and RMS norm over rows: a warp or a block keeps a row in registers, so that each value is read once and written
// once. Backward sums the parameters' gradients in the same pass, a partial row per block.
#pragma once

#include "engine/ops/cuda/column_sums.h"

namespace mbridge::cuda {

template <class T> struct NormForwardArgs {
  const T *x, *gamma, *beta;  // beta: layer norm only.
  int64_t rows;
  int h;
  float epsilon, gamma_offset;
  T* y;
  float *mean, *rstd;  // mean: layer norm only.
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
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    const int column = (lane + k * group) * kN;
    if (column >= a.h) continue;
    float values[kN], gamma[kN], beta[kN] = {};
    Unpack(in[k], values);
    LoadFloats<kN>(a.gamma + column, gamma);
    if constexpr (kLayer) LoadFloats<kN>(a.beta + column, beta);
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = (values[i] - mean) * rstd * (gamma[i] + a.gamma_offset) + beta[i];
    StoreFloats<kN>(a.y + row * a.h + column, values);
  }
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
  for (int j = threadIdx.x; j < a.h; j += blockDim.x) {
    const float beta = kLayer ? Widen(a.beta[j]) : 0.0f;
    a.y[row * a.h + j] = Narrow<T>((Widen(x[j]) - mean) * rstd * (Widen(a.gamma[j]) + a.gamma_offset) + beta);
  }
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
  if (aligned && vectors <= 128) {
    const auto run = [&]<int kHold>(std::integral_constant<int, kHold>) {
      NormForwardKernel<T, kLayer, kHold, true><<<(rows + 7) / 8, 256, 0, stream>>>(a);
    };
    done = true;
    if (vectors <= 32)
      run(std::integral_constant<int, 1>());
    else if (vectors <= 64)
      run(std::integral_constant<int, 2>());
    else if (vectors <= 96)
      run(std::integral_constant<int, 3>());
    else
      run(std::integral_constant<int, 4>());
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
};

// The input gradient from its parts, in the CPU twin's order.
template <class T>
__device__ __forceinline__ float InputGradient(float dy, float gamma, float normal, float mean_t, float mean_dot, float rstd) {
  return Round<T>(rstd * (dy * gamma - mean_t - normal * mean_dot));
}

// Blocks walk over rows and keep their columns' parameter gradients in registers.
template <class T, bool kLayer, bool kResidual, int kHold>
__global__ void __launch_bounds__(512, kHold == 1 ? 2 : 1) NormBackwardKernel(const NormBackwardArgs<T> a) {
  constexpr int kN = kVectorSize<T>, kSums = kLayer ? 2 : 1;
  __shared__ float shared[32];
  const int vectors = a.h / kN;
  const float width = static_cast<float>(a.h);
  Pack<T, kN> scale[kHold];
  float sums[kSums][kHold][kN] = {};
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    const int vector = threadIdx.x + k * blockDim.x;
    if (vector < vectors) scale[k] = LoadPack<kN>(a.gamma + vector * kN);
  }
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Pack<T, kN> g[kHold], in[kHold], residual[kHold];
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int vector = threadIdx.x + k * blockDim.x;
      if (vector >= vectors) continue;
      const int64_t at = row * a.h + vector * kN;
      g[k] = LoadPack<kN>(a.dy + at);
      in[k] = LoadPack<kN>(a.x + at);
      if constexpr (kResidual) residual[k] = LoadPack<kN>(a.residual + at);
    }
    const float mean = kLayer ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (static_cast<int>(threadIdx.x + k * blockDim.x) >= vectors) continue;
      float d[kN], values[kN], gamma[kN];
      Unpack(g[k], d);
      Unpack(in[k], values);
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
    const float mean_dot = BlockSum(dot, shared) / width;
    const float mean_t = kLayer ? BlockSum(sum, shared) / width : 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int vector = threadIdx.x + k * blockDim.x;
      if (vector >= vectors) continue;
      float d[kN], values[kN], gamma[kN], out[kN];
      Unpack(g[k], d);
      Unpack(in[k], values);
      Unpack(scale[k], gamma);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        out[i] = InputGradient<T>(d[i], gamma[i] + a.gamma_offset, (values[i] - mean) * rstd, mean_t, mean_dot, rstd);
      }
      if constexpr (kResidual) {
        float r[kN];
        Unpack(residual[k], r);
#pragma unroll
        for (int i = 0; i < kN; ++i) out[i] += r[i];
      }
      StoreFloats<kN>(a.dx + row * a.h + vector * kN, out);
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int vector = threadIdx.x + k * blockDim.x;
      if (vector < vectors) StoreFloats<kN>(a.partials + (int64_t{blockIdx.x} * kSums + s) * a.h + vector * kN, sums[s][k]);
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
  for (int j = threadIdx.x; j < a.h; j += blockDim.x) {
    const float normal = (Widen(a.x[begin + j]) - mean) * rstd;
    const float d = InputGradient<T>(Widen(a.dy[begin + j]), Widen(a.gamma[j]) + a.gamma_offset, normal, mean_t, mean_dot, rstd);
    a.dx[begin + j] = Narrow<T>(a.residual == nullptr ? d : Widen(a.residual[begin + j]) + d);
  }
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
  const bool done = aligned && WithHold<false>(vectors, 512, [&]<int kHold>(std::integral_constant<int, kHold>) {
                      const unsigned threads = ThreadsFor(vectors, kHold);
                      blocks = std::min<int64_t>(a.rows, 132 * std::clamp<int64_t>(1024 / threads, 1, 8));
                      a.partials = WorkspaceOf<float>(context, blocks * kSums * a.h);
                      const auto grid = static_cast<unsigned>(blocks);
                      if (a.residual != nullptr) {
                        NormBackwardKernel<T, kLayer, true, kHold><<<grid, threads, 0, stream>>>(a);
                      } else {
                        NormBackwardKernel<T, kLayer, false, kHold><<<grid, threads, 0, stream>>>(a);
                      }
                      MB_CUDA_LAUNCHED();
                    });
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
