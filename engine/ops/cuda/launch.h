// What the kernels of this folder share: types, rounding, reductions over a block, launch sizes.
//
// On CUDA storage always equals precision (BF16, F16 or F32 tensors), except where a header says that a tensor is F32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "engine/core/cuda/check.h"
#include "engine/core/op.h"

namespace mbridge::cuda {

inline cudaStream_t StreamOf(const Context& context) { return static_cast<cudaStream_t>(context.stream); }

// Blocks for a grid-stride loop over `count` elements: at most 16 for each of 132 multiprocessors.
inline unsigned GridOf(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(std::clamp<int64_t>((count + per_block - 1) / per_block, 1, 132 * 16));
}

// Scratch of the context as `count` elements of T; throws where it is too small.
template <class T> T* WorkspaceOf(const Context& context, int64_t count) {
  if (static_cast<size_t>(count) * sizeof(T) > context.workspace_bytes) {
    ThrowEngineError("an operator wants {} bytes of workspace, {} are there", count * sizeof(T), context.workspace_bytes);
  }
  return static_cast<T*>(context.workspace);
}

// Calls f(T()) with the device type of a dtype: float, __nv_bfloat16 or __half.
template <class F> void WithType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32: return f(float());
    case DType::kBF16: return f(__nv_bfloat16());
    case DType::kF16: return f(__half());
    default: ThrowEngineError("no CUDA operator for {}", NameOf(dtype));
  }
}

__device__ __forceinline__ float Widen(float x) { return x; }
__device__ __forceinline__ float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float Widen(__half x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T Narrow(float x);
template <> __device__ __forceinline__ float Narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 Narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half Narrow<__half>(float x) { return __float2half_rn(x); }

// x rounded to T and widened again.
template <class T> __device__ __forceinline__ float Round(float x) { return Widen(Narrow<T>(x)); }
__device__ __forceinline__ float RoundTo(DType precision, float x) {
  return precision == DType::kBF16 ? Round<__nv_bfloat16>(x) : precision == DType::kF16 ? Round<__half>(x) : x;
}

// 16 bytes of T at once.
template <class T> struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__device__ __forceinline__ float WarpSum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ __forceinline__ float WarpMax(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Sum over the block, in every thread; the order is fixed. `shared` holds 32 floats. Begins with a barrier, so that calls may
// follow each other on the same memory, but does not end with one: before anything else is written there comes a __syncthreads().
__device__ __forceinline__ float BlockSum(float x, float* shared) {
  x = WarpSum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = (blockDim.x + 31) / 32;
  x = threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0.0f;
  return WarpSum(x);
}
__device__ __forceinline__ float BlockMax(float x, float* shared) {
  x = WarpMax(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = (blockDim.x + 31) / 32;
  x = threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : -INFINITY;
  return WarpMax(x);
}

}  // namespace mbridge::cuda
