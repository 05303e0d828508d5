#include <cuda_fp8.h>

#include "engine/ops/block_quantize.h"
#include "engine/ops/cuda/vectors.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256, kTile = static_cast<int>(kFp8Block), kPitch = kTile + 8, kNeighbours = 16;

struct BlockCopies {
  uint8_t *codes, *transposed;  // Null: not wanted.
  float *scales, *transposed_scales;
  int64_t rows, cols, pitch, transposed_pitch;  // Pitches: of square scales.
};

template <__nv_fp8_interpretation_t kFormat> __device__ uint4 Encode(const float (&values)[kNeighbours], float factor) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kNeighbours; i += 2) {
    const uint32_t codes =
        __nv_cvt_float2_to_fp8x2(make_float2(values[i] * factor, values[i + 1] * factor), __NV_SATFINITE, kFormat);
    words[i / 4] |= codes << (i % 4 * 8);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Powers of two: the quotient is exact wherever it is no subnormal number.
__device__ float InverseOf(float step) { return __fdiv_rn(1.0f, step); }

// A tile of 128 x 128. First pass: eight threads a row, 16 neighbours each, which leave the values in shared memory; second pass:
// two threads a column. kSquares: one scale, so that the first pass waits for the whole tile's maximum.
template <class T, __nv_fp8_interpretation_t kFormat, bool kSquares>
__global__ void __launch_bounds__(kThreads) BlockQuantizeKernel(const T* x, BlockQuantizeOptions options, BlockCopies to) {
  __shared__ alignas(16) T tile[kTile * kPitch];
  __shared__ float shared[2 * kTile];
  constexpr int kRowsAtOnce = kThreads / (kTile / kNeighbours), kPasses = kTile / kRowsAtOnce;
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_col = int64_t{blockIdx.x} * kTile;
  const int lane = threadIdx.x % (kTile / kNeighbours);
  float values[kPasses][kNeighbours], largest[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = threadIdx.x / (kTile / kNeighbours) + pass * kRowsAtOnce;
    const auto pack = LoadPack<kNeighbours>(x + (first_row + r) * to.cols + first_col + lane * kNeighbours);
    StorePack(tile + r * kPitch + lane * kNeighbours, pack);
    Unpack(pack, values[pass]);
    largest[pass] = 0.0f;
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) largest[pass] = fmaxf(largest[pass], fabsf(values[pass][i]));
    for (int offset = kTile / kNeighbours / 2; offset > 0; offset /= 2) {
      largest[pass] = fmaxf(largest[pass], __shfl_xor_sync(0xffffffffu, largest[pass], offset));
    }
  }
  float of_tile = 0.0f;
  if constexpr (kSquares) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) of_tile = fmaxf(of_tile, largest[pass]);
    of_tile = BlockStep(BlockMax(of_tile, shared), options, 1.0f);
    if (threadIdx.x == 0 && to.codes != nullptr) to.scales[blockIdx.y * to.pitch + blockIdx.x] = of_tile;
    if (threadIdx.x == 0 && to.transposed != nullptr)
      to.transposed_scales[blockIdx.x * to.transposed_pitch + blockIdx.y] = of_tile;
  }
  if (to.codes != nullptr) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t row = first_row + threadIdx.x / (kTile / kNeighbours) + pass * kRowsAtOnce;
      const float step = kSquares ? of_tile : BlockStep(largest[pass], options, 1.0f);
      if (!kSquares && lane == 0) to.scales[blockIdx.x * to.rows + row] = step;
      *reinterpret_cast<uint4*>(to.codes + row * to.cols + first_col + lane * kNeighbours) =
          Encode<kFormat>(values[pass], InverseOf(step));
    }
  }
  if (to.transposed == nullptr) return;
  __syncthreads();
  const int c = threadIdx.x % kTile, half = threadIdx.x / kTile;
  float step = of_tile;
  if constexpr (!kSquares) {
    float of_column = 0.0f;
    for (int r = half * kTile / 2; r < (half + 1) * kTile / 2; ++r)
      of_column = fmaxf(of_column, fabsf(Widen(tile[r * kPitch + c])));
    shared[threadIdx.x] = of_column;
    __syncthreads();
    step = BlockStep(fmaxf(shared[c], shared[c + kTile]), options, 1.0f);
    if (half == 0) to.transposed_scales[blockIdx.y * to.cols + first_col + c] = step;
  }
  const float factor = InverseOf(step);
  uint8_t* line = to.transposed + (first_col + c) * to.rows + first_row + half * kTile / 2;
#pragma unroll
  for (int part = 0; part < kTile / 2; part += kNeighbours) {
    float column[kNeighbours];
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) column[i] = Widen(tile[(half * kTile / 2 + part + i) * kPitch + c]);
    *reinterpret_cast<uint4*>(line + part) = Encode<kFormat>(column, factor);
  }
}

template <class T, __nv_fp8_interpretation_t kFormat>
void Launch(const Context& context, const Tensor& x, const BlockQuantizeOptions& options, bool squares, const BlockCopies& to) {
  const dim3 grid(static_cast<unsigned>(to.cols / kTile), static_cast<unsigned>(to.rows / kTile));
  const auto kernel = squares ? &BlockQuantizeKernel<T, kFormat, true> : &BlockQuantizeKernel<T, kFormat, false>;
  kernel<<<grid, kThreads, 0, StreamOf(context)>>>(static_cast<const T*>(x.data), options, to);
  MB_CUDA_LAUNCHED();
}

void BlockQuantizeCuda(const Context& context, const Tensor& x, Fp8Format format, bool squares, const Tensor& codes,
                       const Tensor& scales, const Tensor& transposed, const Tensor& transposed_scales) {
  CheckFp8BlockQuantize(x, squares, codes, scales, transposed, transposed_scales);
  if (x.size() == 0) return;
  const int64_t rows = x.shape[0], cols = x.shape[1];
  if (rows > int64_t{65535} * kTile) ThrowEngineError("8-bit copy of {} rows", rows);
  const BlockQuantizeOptions options{.element = format == Fp8Format::kE4M3 ? kE4M3Float : kE5M2Float};
  const BlockCopies to{static_cast<uint8_t*>(codes.data),
                       static_cast<uint8_t*>(transposed.data),
                       static_cast<float*>(scales.data),
                       static_cast<float*>(transposed_scales.data),
                       rows,
                       cols,
                       (cols / kTile + 3) / 4 * 4,
                       (rows / kTile + 3) / 4 * 4};
  const auto launch = [&]<class T>(T) {
    if (format == Fp8Format::kE4M3) return Launch<T, __NV_E4M3>(context, x, options, squares, to);
    Launch<T, __NV_E5M2>(context, x, options, squares, to);
  };
  switch (x.dtype) {
    case DType::kBF16: return launch(__nv_bfloat16());
    case DType::kF16: return launch(__half());
    default: ThrowEngineError("8-bit copy of {} by blocks: BF16 or F16", NameOf(x.dtype));
  }
}

const bool g_registered = (Fp8BlockQuantize.cuda = &BlockQuantizeCuda, true);

}  // namespace
}  // namespace mbridge::cuda
