// Sums over rows in two stages, in an order that depends on the shape alone: blocks leave partial sums in the workspace, a second
// kernel adds them up, rounds and accumulates.
#pragma once

#include "engine/ops/cuda/early_launch.h"
#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {

struct ColumnOutputs {
  float* sums[2];
};

// outputs[s][column] += round(sum over chunks of partials[chunk, s, column]). 32 columns a block, 32 warps of chunks.
template <class T, int kSums>
__global__ void __launch_bounds__(1024)
    FinishColumnsKernel(const float* partials, int64_t chunks, int64_t n, ColumnOutputs outputs) {
  constexpr int kUnroll = 8, kWarps = 32;
  __shared__ float shared[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  WaitForKernelsBefore();
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    float sum = 0.0f;
    if (column < n) {
      for (int64_t chunk = warp; chunk < chunks; chunk += kWarps * kUnroll) {
        float values[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          const int64_t at = chunk + kWarps * k;
          values[k] = at < chunks ? partials[(at * kSums + s) * n + column] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) sum += values[k];
      }
    }
    __syncthreads();
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < n) {
      float total = shared[0][lane];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) total += shared[w][lane];
      outputs.sums[s][column] += Round<T>(total);
    }
  }
}

template <class T, int kSums>
void FinishColumns(const Context& context, const float* partials, int64_t chunks, int64_t n, const ColumnOutputs& outputs) {
  LaunchEarly(context, &FinishColumnsKernel<T, kSums>, static_cast<unsigned>((n + 31) / 32), 1024, 0, partials, chunks, n,
              outputs);
  MB_CUDA_LAUNCHED();
}

// Body: kN, kSums;  Row: Load(row, column);  Add(row's data, row, column, sums[kSums][kN]), which may also write results for that
// row and column.
template <class Body>
__global__ void __launch_bounds__(256, 4)
    ColumnPartialsKernel(const Body body, int64_t rows, int64_t n, int64_t rows_per_chunk, float* partials) {
  constexpr int kN = Body::kN, kSums = Body::kSums, kUnroll = 4, kWarps = 8;
  __shared__ float shared[kWarps][kSums][32 * kN];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (int64_t{blockIdx.x} * 32 + lane) * kN;
  const int64_t first = int64_t{blockIdx.y} * rows_per_chunk, last = first + rows_per_chunk, end = last < rows ? last : rows;
  float sums[kSums][kN] = {};
  if (column < n) {
    for (int64_t row = first + warp; row < end; row += kWarps * kUnroll) {
      typename Body::Row loaded[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (row + kWarps * k < end) loaded[k] = body.Load(row + kWarps * k, column);
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (row + kWarps * k < end) body.Add(loaded[k], row + kWarps * k, column, sums);
      }
    }
  }
  if (partials == nullptr) return;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int i = 0; i < kN; ++i) shared[warp][s][lane * kN + i] = sums[s][i];
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < kSums * 32 * kN; slot += 256) {
    const int s = slot / (32 * kN), c = slot % (32 * kN);
    const int64_t to = int64_t{blockIdx.x} * 32 * kN + c;
    if (to >= n) continue;
    float total = shared[0][s][c];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += shared[w][s][c];
    partials[(int64_t{blockIdx.y} * kSums + s) * n + to] = total;
  }
}

// outputs[s][column] += round to T(sum over rows). `n` is a multiple of Body::kN. Without outputs.sums[0] only the body's own
// writes happen.
template <class T, class Body>
void SumColumns(const Context& context, const Body& body, int64_t rows, int64_t n, const ColumnOutputs& outputs) {
  if (rows == 0 || n == 0) return;
  const int64_t width = 32 * Body::kN, tiles = (n + width - 1) / width;
  // As many blocks as run at once.
  int64_t chunks = std::clamp<int64_t>(132 * 4 / tiles, 1, (rows + 31) / 32);
  const int64_t rows_per_chunk = (rows + chunks - 1) / chunks;
  chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
  const bool sums = outputs.sums[0] != nullptr;
  float* partials = sums ? WorkspaceOf<float>(context, chunks * Body::kSums * n) : nullptr;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(chunks));
  ColumnPartialsKernel<<<grid, 256, 0, StreamOf(context)>>>(body, rows, n, rows_per_chunk, partials);
  MB_CUDA_LAUNCHED();
  if (sums) FinishColumns<T, Body::kSums>(context, partials, chunks, n, outputs);
}

}  // namespace mbridge::cuda
