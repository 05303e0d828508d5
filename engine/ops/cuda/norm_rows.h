// Layer norm and RMS norm over rows: each value is read once and written once. A warp keeps a narrow row in registers; wider ones
// pass through shared memory, where a block copies rows ahead of the one it works on. Backward sums the parameters' gradients in
// the same pass, a partial row per block.
#pragma once

#include "engine/ops/cuda/async_copy.h"
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
  const T* residual = nullptr;
  T* hidden = nullptr;  // Where there is a residual: x + residual, which is normalised.
};

// residual + x, stored.
template <class T, int kN>
__device__ __forceinline__ Pack<T, kN> StoreSum(const Pack<T, kN>& x, const Pack<T, kN>& residual, T* to) {
  float values[kN], before[kN];
  Unpack(x, values);
  Unpack(residual, before);
#pragma unroll
  for (int i = 0; i < kN; ++i) values[i] += before[i];
  const Pack<T, kN> sum = MakePack<T, kN>(values);
  StorePack(to, sum);
  return sum;
}

// Two sums over the `threads` that share a row and, unless they are the whole block, barrier 1 + `group`; one barrier. `shared`
// holds a pair for each of their warps and must be another one at the next call.
template <bool kSecond> __device__ __forceinline__ float2 GroupSums(float x, float y, float2* shared, int group, int threads) {
  x = WarpSum(x);
  if constexpr (kSecond) y = WarpSum(y);
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[(threadIdx.x - group * threads) / 32] = {x, y};
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
  const float2 part = lane < threads / 32 ? shared[lane] : float2{};
  return {WarpSum(part.x), kSecond ? WarpSum(part.y) : 0.0f};
}

// kHold vectors of a row that a thread has, `apart` vectors from each other.
template <class T, int kHold> using Held = Pack<T, kVectorSize<T>>[kHold];

template <class T, int kHold>
__device__ __forceinline__ float SquaresOf(const Held<T, kHold>& in, float mean, int first, int apart, int vectors) {
  constexpr int kN = kVectorSize<T>;
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (first + k * apart >= vectors) continue;
    float values[kN];
    Unpack(in[k], values);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float d = values[i] - mean;
      squares += d * d;
    }
  }
  return squares;
}

template <class T, int kHold>
__device__ __forceinline__ float SumOf(const Held<T, kHold>& in, int first, int apart, int vectors) {
  constexpr int kN = kVectorSize<T>;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (first + k * apart >= vectors) continue;
    float values[kN];
    Unpack(in[k], values);
#pragma unroll
    for (int i = 0; i < kN; ++i) sum += values[i];
  }
  return sum;
}

// A warp a row.
template <class T, bool kLayer, bool kAdd, int kHold>
__global__ void __launch_bounds__(256) NormForwardWarpKernel(const NormForwardArgs<T> a) {
  constexpr int kN = kVectorSize<T>;
  const int lane = threadIdx.x % 32, vectors = a.h / kN;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= a.rows) return;
  Pack<T, kN> in[kHold];
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (lane + k * 32 < vectors) in[k] = LoadPack<kN>(a.x + row * a.h + (lane + k * 32) * kN);
  }
  if constexpr (kAdd) {
    Pack<T, kN> residual[kHold];
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * 32 < vectors) residual[k] = LoadPack<kN>(a.residual + row * a.h + (lane + k * 32) * kN);
    }
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * 32 < vectors) in[k] = StoreSum(in[k], residual[k], a.hidden + row * a.h + (lane + k * 32) * kN);
    }
  }
  const float mean = kLayer ? WarpSum(SumOf<T, kHold>(in, lane, 32, vectors)) / static_cast<float>(a.h) : 0.0f;
  const float squares = WarpSum(SquaresOf<T, kHold>(in, mean, lane, 32, vectors));
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.h) + a.epsilon);
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    const int column = (lane + k * 32) * kN;
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

// Blocks walk over rows, the last first, since the operator before left those in the L2 cache. A row at a time, while the next
// are on their way into the ring; a thread reads only what it copied itself. Two rows a block are the fastest (within 1 %): a
// block that ends makes room for the next, where long ones end together and leave the memory idle.
template <class T, bool kLayer, bool kAdd, int kHold, int kStages>
__global__ void __launch_bounds__(1024) NormForwardRowsKernel(const NormForwardArgs<T> a) {
  constexpr int kN = kVectorSize<T>, kHeld = kAdd ? 2 * kHold : kHold;
  extern __shared__ uint4 ring[];  // [kStages, kHeld, threads]: x, then the residual.
  __shared__ float2 shared[2][32];
  const int thread = threadIdx.x, threads = blockDim.x, vectors = a.h / kN;
  WaitForKernelsBefore();
  StartNextKernel();
  Pack<T, kN> gamma[kHold], beta[kLayer ? kHold : 1];
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (thread + k * threads >= vectors) continue;
    gamma[k] = LoadPack<kN>(a.gamma + (thread + k * threads) * kN);
    if constexpr (kLayer) beta[k] = LoadPack<kN>(a.beta + (thread + k * threads) * kN);
  }
  const auto fetch = [&](int64_t row, int slot) {
    if (row >= 0) {
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        const int vector = thread + k * threads;
        if (vector >= vectors) continue;
        uint4* const to = ring + slot * kHeld * threads + vector;
        CopyAsync16(to, a.x + row * a.h + vector * kN);
        if constexpr (kAdd) CopyAsync16(to + kHold * threads, a.residual + row * a.h + vector * kN);
      }
    }
    CommitCopies();
  };
  const int64_t stride = gridDim.x;
  int64_t row = a.rows - 1 - blockIdx.x;
#pragma unroll
  for (int slot = 0; slot < kStages - 1; ++slot) fetch(row - slot * stride, slot);
  float largest = 0.0f;
  int sums = 0;  // Which half of `shared` is free.
  for (int slot = 0; row >= 0; row -= stride) {
    fetch(row - (kStages - 1) * stride, slot == 0 ? kStages - 1 : slot - 1);
    WaitForCopies<kStages - 1>();
    Pack<T, kN> in[kHold];
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int vector = thread + k * threads;
      in[k].units[0] = ring[slot * kHeld * threads + vector];
      if constexpr (kAdd) {
        Pack<T, kN> residual;
        residual.units[0] = ring[(slot * kHeld + kHold) * threads + vector];
        if (vector < vectors) in[k] = StoreSum(in[k], residual, a.hidden + row * a.h + vector * kN);
      }
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
    float mean = 0.0f;
    if constexpr (kLayer) {
      mean = GroupSums<false>(SumOf<T, kHold>(in, thread, threads, vectors), 0.0f, shared[sums], 0, threads).x /
             static_cast<float>(a.h);
      sums ^= 1;
    }
    const float squares =
        GroupSums<false>(SquaresOf<T, kHold>(in, mean, thread, threads, vectors), 0.0f, shared[sums], 0, threads).x;
    sums ^= 1;
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.h) + a.epsilon);
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int column = (thread + k * threads) * kN;
      if (column >= a.h) continue;
      float values[kN], factors[kN], added[kN] = {};
      Unpack(in[k], values);
      Unpack(gamma[k], factors);
      if constexpr (kLayer) Unpack(beta[k], added);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        values[i] = (values[i] - mean) * rstd * (factors[i] + a.gamma_offset) + added[i];
        largest = fmaxf(largest, fabsf(values[i]));
      }
      StoreFloats<kN>(a.y + row * a.h + column, values);
    }
    if (thread == 0) {
      if constexpr (kLayer) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
}

// Any width and alignment: a block a row, three passes.
template <class T, bool kLayer> __global__ void __launch_bounds__(256) NormForwardAnyKernel(const NormForwardArgs<T> a) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const T* x = a.x + row * a.h;
  if (a.residual != nullptr) {  // A thread reads below what it writes here.
    T* const hidden = a.hidden + row * a.h;
    for (int j = threadIdx.x; j < a.h; j += blockDim.x) hidden[j] = Narrow<T>(Widen(a.residual[row * a.h + j]) + Widen(x[j]));
    x = hidden;
  }
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

// f(vectors a lane holds where a warp has a row): at most 4 of them; false for wider rows.
template <class F> bool WithWarpHold(int64_t vectors, F&& f) {
  if (vectors <= 32) return f(std::integral_constant<int, 1>()), true;
  if (vectors <= 64) return f(std::integral_constant<int, 2>()), true;
  if (vectors <= 96) return f(std::integral_constant<int, 3>()), true;
  if (vectors <= 128) return f(std::integral_constant<int, 4>()), true;
  return false;
}

// Allows the kernel `bytes` of dynamic shared memory. Of the 48 KiB that need no leave, the kernel's static part is taken off.
template <class Kernel> void AllowShared(Kernel* kernel, int64_t bytes) {
  if (bytes > 46 << 10)
    MB_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

inline constexpr unsigned kMultiprocessors = 132;

// At most `most` blocks, each with as many rows as the others but for the last: the rounds are as many as with `most` blocks, and
// no few blocks are left alone with a last one.
inline int64_t EvenBlocks(int64_t rows, int64_t most) {
  const int64_t rounds = (rows + most - 1) / most;
  return (rows + rounds - 1) / rounds;
}

inline unsigned ThreadsFor(int64_t vectors, int hold) {
  return static_cast<unsigned>(((vectors + hold - 1) / hold + 31) / 32 * 32);
}

// kHold decides the order of the sums: the same with and without residual. More stages gain nothing.
template <class T, bool kLayer, bool kAdd = false, int kHold = 2, int kStages = 2>
void LaunchNormForward(const Context& context, const NormForwardArgs<T>& a) {
  if (a.rows == 0) return;
  const cudaStream_t stream = StreamOf(context);
  const int64_t vectors = a.h / kVectorSize<T>;
  const bool aligned = a.h % kVectorSize<T> == 0 && AreAligned16(a.x, a.gamma, a.beta, a.y, a.residual, a.hidden);
  if (a.rows > INT32_MAX) ThrowEngineError("norm over {} rows", a.rows);
  const auto rows = static_cast<unsigned>(a.rows);
  bool done = aligned && WithWarpHold(vectors, [&]<int kLanes>(std::integral_constant<int, kLanes>) {
                NormForwardWarpKernel<T, kLayer, kAdd, kLanes><<<(rows + 7) / 8, 256, 0, stream>>>(a);
              });
  if (!done && aligned && vectors <= 1024 * kHold) {
    const unsigned threads = ThreadsFor(vectors, kHold), blocks = (rows + 1) / 2;
    const int64_t shared = int64_t{16} * kStages * (kAdd ? 2 : 1) * kHold * threads;
    auto* const kernel = &NormForwardRowsKernel<T, kLayer, kAdd, kHold, kStages>;
    AllowShared(kernel, shared);
    LaunchEarly(context, kernel, blocks, threads, static_cast<size_t>(shared), a);
    done = true;
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

// The input gradient from its parts, in the CPU twin's order. The product is rounded before a residual is added to it.
template <class T>
__device__ __forceinline__ float InputGradient(float dy, float gamma, float normal, float mean_t, float mean_dot, float rstd) {
  return Round<T>(__fmul_rn(rstd, dy * gamma - mean_t - normal * mean_dot));
}

// One row's part of a thread: adds to the parameters' gradients, gives what it has of the sums of t n and t.
template <class T, bool kLayer, int kN>
__device__ __forceinline__ void AddToSums(const Pack<T, kN>& dy, const Pack<T, kN>& x, const Pack<T, kN>& scale, float offset,
                                          float mean, float rstd, float (&gammas)[kN], float (&betas)[kN], float* dot,
                                          float* sum) {
  float d[kN], values[kN], gamma[kN];
  Unpack(dy, d);
  Unpack(x, values);
  Unpack(scale, gamma);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float normal = (values[i] - mean) * rstd, t = d[i] * (gamma[i] + offset);
    *dot += t * normal;
    gammas[i] += d[i] * normal;
    if constexpr (kLayer) {
      *sum += t;
      betas[i] += d[i];
    }
  }
}

// dx of a vector, stored; returns the largest magnitude so far.
template <class T, int kN>
__device__ __forceinline__ float StoreInputGradient(const Pack<T, kN>& dy, const Pack<T, kN>& x, const Pack<T, kN>& scale,
                                                    const Pack<T, kN>& residual, bool has_residual, float offset, float mean,
                                                    float rstd, float mean_t, float mean_dot, T* to, float largest) {
  float d[kN], values[kN], gamma[kN], out[kN];
  Unpack(dy, d);
  Unpack(x, values);
  Unpack(scale, gamma);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    out[i] = InputGradient<T>(d[i], gamma[i] + offset, (values[i] - mean) * rstd, mean_t, mean_dot, rstd);
  }
  if (has_residual) {
    float r[kN];
    Unpack(residual, r);
#pragma unroll
    for (int i = 0; i < kN; ++i) out[i] += r[i];
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) largest = fmaxf(largest, fabsf(out[i]));
  StoreFloats<kN>(to, out);
  return largest;
}

// Blocks of 256 threads that share a multiprocessor's registers.
template <bool kLayer, int kHold> inline constexpr int kNormBackwardBlocks = kHold == 1 ? 4 : kHold < 4 || !kLayer ? 2 : 1;

// What a thread holds of a row.
template <class T, int kHold> struct NormBackwardRow {
  Pack<T, kVectorSize<T>> dy[kHold], x[kHold], residual[kHold];
  float mean, rstd;
};

// A warp a row. Blocks walk over rows, the last first, since the product before left those in the L2 cache, and keep their
// columns' parameter gradients in registers.
template <class T, bool kLayer, int kHold>
__global__ void __launch_bounds__(256, kNormBackwardBlocks<kLayer, kHold>) NormBackwardWarpKernel(const NormBackwardArgs<T> a) {
  constexpr int kN = kVectorSize<T>, kSums = kLayer ? 2 : 1, kWarps = 8;
  const int lane = threadIdx.x % 32, vectors = a.h / kN;
  const float width = static_cast<float>(a.h);
  Pack<T, kN> scale[kHold];
  float sums[2][kHold][kN] = {};
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (lane + k * 32 < vectors) scale[k] = LoadPack<kN>(a.gamma + (lane + k * 32) * kN);
  }
  const auto load = [&](int64_t row) {
    NormBackwardRow<T, kHold> loaded;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * 32 >= vectors) continue;
      const int64_t at = row * a.h + (lane + k * 32) * kN;
      loaded.dy[k] = LoadPack<kN>(a.dy + at);
      loaded.x[k] = LoadPack<kN>(a.x + at);
      if (a.residual != nullptr) loaded.residual[k] = LoadPack<kN>(a.residual + at);
    }
    loaded.mean = kLayer ? a.mean[row] : 0.0f;
    loaded.rstd = a.rstd[row];
    return loaded;
  };
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  int64_t row = a.rows - 1 - (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32);
  NormBackwardRow<T, kHold> current;
  float largest = 0.0f;
  if (row >= 0) current = load(row);
  while (row >= 0) {
    const float mean = current.mean, rstd = current.rstd;
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * 32 >= vectors) continue;
      AddToSums<T, kLayer>(current.dy[k], current.x[k], scale[k], a.gamma_offset, mean, rstd, sums[0][k], sums[1][k], &dot, &sum);
    }
    const float mean_dot = WarpSum(dot) / width, mean_t = kLayer ? WarpSum(sum) / width : 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * 32 >= vectors) continue;
      largest =
          StoreInputGradient(current.dy[k], current.x[k], scale[k], current.residual[k], a.residual != nullptr, a.gamma_offset,
                             mean, rstd, mean_t, mean_dot, a.dx + row * a.h + (lane + k * 32) * kN, largest);
    }
    row -= stride;
    if (row >= 0) current = load(row);
  }
  StartNextKernel();
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
  // A row of partial sums a block; those of its warps are joined first.
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
}

// How NormBackwardRowsKernel works: rows copied ahead, and threads of a block, one in a multiprocessor.
inline constexpr int kNormBackwardStages = 2;
template <int kHold> inline constexpr int kNormBackwardThreads = 1024 / kHold;

// The same with the rows' tensors on their way into a ring in shared memory; groups of `group_threads` have a row each.
template <class T, bool kLayer, int kHold>
__global__ void __launch_bounds__(kNormBackwardThreads<kHold>, 1)
    NormBackwardRowsKernel(const NormBackwardArgs<T> a, int group_threads) {
  constexpr int kN = kVectorSize<T>, kSums = kLayer ? 2 : 1, kStages = kNormBackwardStages;
  extern __shared__ uint4 ring[];      // [kStages, 3, kHold, threads]
  __shared__ float2 shared[2][6][16];  // For up to six groups of up to 16 warps.
  const int group = threadIdx.x / group_threads, lane = threadIdx.x % group_threads, groups = blockDim.x / group_threads;
  const int vectors = a.h / kN;
  const float width = static_cast<float>(a.h);
  WaitForKernelsBefore();
  Pack<T, kN> scale[kHold];
  float sums[2][kHold][kN] = {};
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    if (lane + k * group_threads < vectors) scale[k] = LoadPack<kN>(a.gamma + (lane + k * group_threads) * kN);
  }
  const auto place = [&](int slot, int tensor, int k) {
    return ring + ((slot * 3 + tensor) * kHold + k) * blockDim.x + threadIdx.x;
  };
  const auto fetch = [&](int64_t row, int slot) {
    if (row >= 0) {
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        if (lane + k * group_threads >= vectors) continue;
        const int64_t at = row * a.h + (lane + k * group_threads) * kN;
        CopyAsync16(place(slot, 0, k), a.dy + at);
        CopyAsync16(place(slot, 1, k), a.x + at);
        if (a.residual != nullptr) CopyAsync16(place(slot, 2, k), a.residual + at);
      }
    }
    CommitCopies();
  };
  const int64_t stride = int64_t{gridDim.x} * groups;
  int64_t row = a.rows - 1 - (int64_t{blockIdx.x} * groups + group);
#pragma unroll
  for (int slot = 0; slot < kStages - 1; ++slot) fetch(row - slot * stride, slot);
  float largest = 0.0f, next_mean = 0.0f, next_rstd = 0.0f;
  const auto load_statistics = [&](int64_t of) {
    if (of < 0) return;
    if constexpr (kLayer) next_mean = a.mean[of];
    next_rstd = a.rstd[of];
  };
  load_statistics(row);
  for (int slot = 0, turn = 0; row >= 0; row -= stride, turn ^= 1) {
    fetch(row - (kStages - 1) * stride, slot == 0 ? kStages - 1 : slot - 1);
    const float mean = next_mean, rstd = next_rstd;
    load_statistics(row - stride);
    WaitForCopies<kStages - 1>();
    Pack<T, kN> dy[kHold], x[kHold];
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * group_threads >= vectors) continue;
      dy[k].units[0] = *place(slot, 0, k);
      x[k].units[0] = *place(slot, 1, k);
      AddToSums<T, kLayer>(dy[k], x[k], scale[k], a.gamma_offset, mean, rstd, sums[0][k], sums[1][k], &dot, &sum);
    }
    const float2 both = GroupSums<kLayer>(dot, sum, shared[turn][group], group, group_threads);
    const float mean_dot = both.x / width, mean_t = kLayer ? both.y / width : 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      if (lane + k * group_threads >= vectors) continue;
      Pack<T, kN> residual;
      if (a.residual != nullptr) residual.units[0] = *place(slot, 2, k);
      largest = StoreInputGradient(dy[k], x[k], scale[k], residual, a.residual != nullptr, a.gamma_offset, mean, rstd, mean_t,
                                   mean_dot, a.dx + row * a.h + (lane + k * group_threads) * kN, largest);
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  StartNextKernel();
  if (a.amax != nullptr) RaiseMaximum(a.amax, Round<T>(largest));
  // A row of partial sums a block: the groups add theirs one after the other.
  auto* const joined = reinterpret_cast<float*>(ring);  // [kSums, h]
  for (int adding = 0; adding < groups; ++adding) {
    __syncthreads();
    if (group != adding) continue;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        const int column = (lane + k * group_threads) * kN;
        if (column >= a.h) continue;
        float total[kN] = {};
        if (adding > 0) LoadFloats<kN>(joined + s * a.h + column, total);
#pragma unroll
        for (int i = 0; i < kN; ++i) total[i] += sums[s][k][i];
        float* const to = adding + 1 < groups ? joined + s * a.h : a.partials + (int64_t{blockIdx.x} * kSums + s) * a.h;
        StoreFloats<kN>(to + column, total);
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
  const auto start = [&](int64_t wanted) {
    blocks = wanted;
    a.partials = WorkspaceOf<float>(context, blocks * kSums * a.h);
    return static_cast<unsigned>(blocks);
  };
  const auto run_rows = [&]<int kHold>(std::integral_constant<int, kHold>) {
    const unsigned group = ThreadsFor(vectors, kHold), groups = kNormBackwardThreads<kHold> / group, threads = group * groups;
    const int64_t shared = int64_t{16} * kNormBackwardStages * 3 * kHold * threads;
    auto* const kernel = &NormBackwardRowsKernel<T, kLayer, kHold>;
    AllowShared(kernel, shared);
    const unsigned all = start(EvenBlocks((a.rows + groups - 1) / groups, kMultiprocessors));
    LaunchEarly(context, kernel, all, threads, static_cast<size_t>(shared), a, static_cast<int>(group));
  };
  bool done = aligned && WithWarpHold(vectors, [&]<int kHold>(std::integral_constant<int, kHold>) {
                NormBackwardWarpKernel<T, kLayer, kHold>
                    <<<start(std::min<int64_t>((a.rows + 7) / 8, kMultiprocessors * kNormBackwardBlocks<kLayer, kHold>)), 256, 0,
                       stream>>>(a);
              });
  if (!done && aligned && vectors <= 1024) {
    vectors <= 512 ? run_rows(std::integral_constant<int, 1>()) : run_rows(std::integral_constant<int, 2>());
    done = true;
  }
  MB_CUDA_LAUNCHED();
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
