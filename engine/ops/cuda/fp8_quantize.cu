#include <cuda_fp8.h>

#include <cfloat>

#include "engine/ops/cuda/launch.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256, kTile = 128, kPitch = kTile + 4;

// Positive floats are ordered as their bits.
__device__ void RaiseTo(float* amax, float value, float* shared) {
  value = BlockMax(value, shared);
  if (threadIdx.x == 0 && value > 0.0f) atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

template <class T> __global__ void AmaxKernel(const T* x, int64_t count, float* amax) {
  __shared__ float shared[32];
  float largest = 0.0f;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    largest = fmaxf(largest, fabsf(Widen(x[i])));
  }
  RaiseTo(amax, largest, shared);
}

__device__ float ScaleOf(float amax, float largest, float margin_factor, bool power_of_two) {
  if (!(amax > 0.0f) || !isfinite(amax)) return 1.0f;
  float scale = __fmul_rn(__fdiv_rn(largest, amax), margin_factor);
  if (isinf(scale)) scale = FLT_MAX;
  return power_of_two ? ldexpf(1.0f, ilogbf(scale)) : scale;
}

__global__ void ScalesKernel(const float* amax, int64_t count, float largest, float margin_factor, bool power_of_two,
                             float* scale, float* inverse) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  scale[i] = ScaleOf(amax[i], largest, margin_factor, power_of_two);
  inverse[i] = __fdiv_rn(1.0f, scale[i]);
}

__global__ void DelayedScalesKernel(float* history, int64_t length, int64_t count, bool most_recent, float largest,
                                    float margin_factor, bool power_of_two, float* scale, float* inverse) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  const float newest = history[i];
  float amax = newest;
  for (int64_t row = 0; row + 1 < length; ++row) {
    const float next = history[(row + 1) * count + i];
    if (!most_recent) amax = fmaxf(amax, next);
    history[row * count + i] = next;
  }
  history[(length - 1) * count + i] = newest;
  history[i] = 0.0f;
  scale[i] = ScaleOf(amax, largest, margin_factor, power_of_two);
  inverse[i] = __fdiv_rn(1.0f, scale[i]);
}

// A tile of 128 x 128: threads take 16 neighbouring elements, write their codes row by row, and leave them in shared memory for
// the transpose, of which each thread writes 32 bytes of one column at once (whole memory sectors).
template <class T, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads) QuantizeKernel(const T* x, const float* scale, int64_t rows, int64_t cols,
                                                           uint8_t* rowwise, uint8_t* columnwise, float* amax) {
  __shared__ alignas(16) uint8_t tile[kTile * kPitch];
  __shared__ float shared[32];
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_col = int64_t{blockIdx.x} * kTile;
  const float factor = *scale;
  float largest = 0.0f;
  const int64_t col = first_col + threadIdx.x % 8 * 16;
  for (int r = threadIdx.x / 8; r < kTile; r += kThreads / 8) {
    const int64_t row = first_row + r;
    if (row >= rows || col >= cols) continue;
    constexpr int kPerVector = Vector<T>::kSize;
    const auto* from = reinterpret_cast<const Vector<T>*>(x + row * cols + col);
    uint32_t words[4] = {};
#pragma unroll
    for (int v = 0; v < 16 / kPerVector; ++v) {
      const Vector<T> values = from[v];
#pragma unroll
      for (int i = 0; i < kPerVector; i += 2) {
        const float2 pair = make_float2(Widen(values.values[i]), Widen(values.values[i + 1]));
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        const uint32_t codes = __nv_cvt_float2_to_fp8x2(make_float2(pair.x * factor, pair.y * factor), __NV_SATFINITE, kFormat);
        const int at = v * kPerVector + i;
        words[at / 4] |= codes << (at % 4 * 8);
      }
    }
    const uint4 packed = make_uint4(words[0], words[1], words[2], words[3]);
    if (rowwise != nullptr) *reinterpret_cast<uint4*>(rowwise + row * cols + col) = packed;
    auto* line = reinterpret_cast<uint32_t*>(tile + r * kPitch + threadIdx.x % 8 * 16);
    line[0] = packed.x, line[1] = packed.y, line[2] = packed.z, line[3] = packed.w;
  }
  if (columnwise != nullptr) {
    __syncthreads();
    for (int item = threadIdx.x; item < kTile * 4; item += kThreads) {
      const int c = item % kTile, r = item / kTile * 32;
      if (first_col + c >= cols) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + r + half * 16;
        if (row >= rows) break;
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint8_t* at = tile + (r + half * 16 + w * 4) * kPitch + c;
          words[w] = at[0] | at[kPitch] << 8 | at[2 * kPitch] << 16 | static_cast<uint32_t>(at[3 * kPitch]) << 24;
        }
        *reinterpret_cast<uint4*>(columnwise + (first_col + c) * rows + row) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  if (amax != nullptr) RaiseTo(amax, largest, shared);
}

void AmaxCuda(const Context& context, const Tensor& x, const Tensor& amax) {
  if (x.size() == 0) return;
  WithType(x.dtype, [&]<class T>(T) {
    AmaxKernel<<<GridOf(x.size(), kThreads * 8), kThreads, 0, StreamOf(context)>>>(static_cast<const T*>(x.data), x.size(),
                                                                                   amax.as<float>());
  });
  MB_CUDA_LAUNCHED();
}

unsigned BlocksOf(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

void ScalesCuda(const Context& context, const Tensor& amax, const Fp8ScaleOptions& o, const Tensor& scale,
                const Tensor& inverse) {
  ScalesKernel<<<BlocksOf(amax.size()), kThreads, 0, StreamOf(context)>>>(amax.as<float>(), amax.size(), LargestOf(o.format),
                                                                          std::ldexp(1.0f, -o.margin), o.power_of_two,
                                                                          scale.as<float>(), inverse.as<float>());
  MB_CUDA_LAUNCHED();
}

void DelayedScalesCuda(const Context& context, const Tensor& history, bool most_recent, const Fp8ScaleOptions& o,
                       const Tensor& scale, const Tensor& inverse) {
  DelayedScalesKernel<<<BlocksOf(history.shape[1]), kThreads, 0, StreamOf(context)>>>(
      history.as<float>(), history.shape[0], history.shape[1], most_recent, LargestOf(o.format), std::ldexp(1.0f, -o.margin),
      o.power_of_two, scale.as<float>(), inverse.as<float>());
  MB_CUDA_LAUNCHED();
}

template <class Pointer> Pointer* DataOf(const Tensor& tensor) { return tensor.empty() ? nullptr : tensor.as<Pointer>(); }

void QuantizeCuda(const Context& context, const Tensor& x, const Tensor& scale, Fp8Format format, const Tensor& rowwise,
                  const Tensor& columnwise, const Tensor& amax) {
  CheckFp8Quantize(x, scale, rowwise, columnwise);
  const int64_t rows = x.shape[0], cols = x.shape[1];
  if (rows == 0 || cols == 0) return;
  if (rows > int64_t{65535} * kTile) ThrowEngineError("8-bit copy of {} rows", rows);
  const dim3 grid(static_cast<unsigned>((cols + kTile - 1) / kTile), static_cast<unsigned>((rows + kTile - 1) / kTile));
  WithType(x.dtype, [&]<class T>(T) {
    const auto kernel = format == Fp8Format::kE4M3 ? &QuantizeKernel<T, __NV_E4M3> : &QuantizeKernel<T, __NV_E5M2>;
    kernel<<<grid, kThreads, 0, StreamOf(context)>>>(static_cast<const T*>(x.data), scale.as<float>(), rows, cols,
                                                     DataOf<uint8_t>(rowwise), DataOf<uint8_t>(columnwise), DataOf<float>(amax));
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (Fp8Amax.cuda = &AmaxCuda, Fp8Scales.cuda = &ScalesCuda, Fp8DelayedScales.cuda = &DelayedScalesCuda,
                           Fp8Quantize.cuda = &QuantizeCuda, true);

}  // namespace
}  // namespace mbridge::cuda
