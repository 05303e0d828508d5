// The largest value of a tensor as a by-product of a kernel.
#pragma once

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {

// *maximum = max(*maximum, value of every thread of the warp); values from 0 on. Positive floats are ordered as their bits. The
// plain read spares nearly all atomics once a large value was seen.
__device__ __forceinline__ void RaiseMaximum(float* maximum, float value) {
  value = WarpMax(value);
  const auto lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
  if (lane == 0 && value > __ldcg(maximum)) atomicMax(reinterpret_cast<int*>(maximum), __float_as_int(value));
}

// As RowsKernel (vectors.h), with a Finish that returns the largest magnitude of what it stored, before rounding to T.
template <class T, int kRows, class Body>
__global__ void __launch_bounds__(256)
    RowsWithMaximumKernel(const Body body, int64_t rows, int64_t vectors, unsigned tiles, float* maximum) {
  const int64_t vector = int64_t{blockIdx.x % tiles} * blockDim.x + threadIdx.x;
  const int64_t column = vector * Body::kN;
  const int64_t first = int64_t{blockIdx.x / tiles} * kRows * blockDim.y + threadIdx.y;
  float largest = 0.0f;
  if (vector < vectors) {
    const auto columns = body.Columns(column);
    typename Body::Row loaded[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first + k * blockDim.y;
      if (row < rows) loaded[k] = body.Load(row, column);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first + k * blockDim.y;
      if (row < rows) largest = fmaxf(largest, body.Finish(columns, loaded[k], row, column));
    }
  }
  RaiseMaximum(maximum, Round<T>(largest));
}

template <class T, int kRows, class Body>
void LaunchRowsWithMaximum(const Context& context, const Body& body, int64_t rows, int64_t width, float* maximum) {
  if (rows == 0 || width == 0) return;
  const RowsLaunch launch(rows, width, Body::kN, kRows);
  RowsWithMaximumKernel<T, kRows>
      <<<launch.blocks, launch.block, 0, StreamOf(context)>>>(body, rows, launch.vectors, launch.tiles, maximum);
  MB_CUDA_LAUNCHED();
}

}  // namespace mbridge::cuda
