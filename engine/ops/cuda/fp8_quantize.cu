#include <cuda_fp8.h>

#include <cfloat>

#include "engine/ops/cuda/maximum.h"
#include "engine/ops/cuda/vectors.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256, kTile = 128, kPitch = kTile + 4;

// A thread takes four packs of kN neighbours at a time.
template <class T, int kN> __global__ void __launch_bounds__(kThreads) AmaxKernel(const T* x, int64_t packs, float* amax) {
  constexpr int kAtOnce = 4;
  float largest = 0.0f;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < packs; i += kAtOnce * stride) {
    Pack<T, kN> loaded[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (i + k * stride < packs) loaded[k] = LoadPack<kN>(x + (i + k * stride) * kN);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (i + k * stride >= packs) break;
      float values[kN];
      Unpack(loaded[k], values);
#pragma unroll
      for (int j = 0; j < kN; ++j) largest = fmaxf(largest, fabsf(values[j]));
    }
  }
  RaiseMaximum(amax, largest);
}

__device__ float ScaleOf(float amax, float largest, float margin_factor, bool power_of_two) {
  if (!(amax > 0.0f) || !isfinite(amax)) return 1.0f;
  float scale = __fmul_rn(__fdiv_rn(largest, amax), margin_factor);
  if (isinf(scale)) scale = FLT_MAX;
  return power_of_two ? ldexpf(1.0f, ilogbf(scale)) : scale;
}

__global__ void DelayedScalesKernel(float* history, int64_t length, int64_t count, bool most_recent, float largest,
                                    float margin_factor, bool power_of_two, float* scale, float* inverse) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  const float newest = isfinite(history[i]) ? history[i] : 0.0f;
  float amax = newest;
  for (int64_t row = 0; row + 1 < length; ++row) {
    const float next = history[(row + 1) * count + i];
    if (!most_recent) amax = fmaxf(amax, next);
    history[row * count + i] = next;
  }
  history[(length - 1) * count + i] = newest;
  history[i] = 0.0f;
  scale[i] = ScaleOf(amax, largest, margin_factor, power_of_two);
  inverse[i * kFp8ScalePitch] = __fdiv_rn(1.0f, scale[i]);
}

// Where a kernel's scale comes from: given, or made of the tensor's largest value and written behind it.
struct ScaleSource {
  const float* given;
  float* scales;  // [3, kFp8ScalePitch]: largest value, scale, 1 / scale; null with a given scale.
  float largest, margin_factor;
  bool power_of_two;

  __device__ float Take() const {
    if (scales == nullptr) return *given;
    const float scale = ScaleOf(scales[0], largest, margin_factor, power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      scales[kFp8ScalePitch] = scale;
      scales[2 * kFp8ScalePitch] = __fdiv_rn(1.0f, scale);
    }
    return scale;
  }
};

// A tile of 128 x 128: threads take 16 neighbouring elements, write their codes row by row, and leave them in shared memory for
// the transpose, of which each thread writes 32 bytes of one column at once (whole memory sectors).
template <class T, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads) QuantizeKernel(const T* x, ScaleSource scale, int64_t rows, int64_t cols,
                                                           uint8_t* rowwise, uint8_t* columnwise, float* amax) {
  __shared__ alignas(16) uint8_t tile[kTile * kPitch];
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_col = int64_t{blockIdx.x} * kTile;
  const float factor = scale.Take();
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
  if (amax != nullptr) RaiseMaximum(amax, largest);
}

void AmaxCuda(const Context& context, const Tensor& x, const Tensor& amax) {
  if (x.size() == 0) return;
  WithType(x.dtype, [&]<class T>(T) {
    constexpr int kWide = kVectorSize<T>;
    const T* values = PointerOf<T>(x);
    const bool wide = x.size() % kWide == 0 && AreAligned16(values);
    const auto kernel = wide ? &AmaxKernel<T, kWide> : &AmaxKernel<T, 1>;
    const int64_t packs = wide ? x.size() / kWide : x.size();
    kernel<<<GridOf(packs, kThreads * 4), kThreads, 0, StreamOf(context)>>>(values, packs, amax.as<float>());
  });
  MB_CUDA_LAUNCHED();
}

unsigned BlocksOf(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

void DelayedScalesCuda(const Context& context, const Tensor& history, bool most_recent, const Fp8ScaleOptions& o,
                       const Tensor& scale, const Tensor& inverse) {
  DelayedScalesKernel<<<BlocksOf(history.shape[1]), kThreads, 0, StreamOf(context)>>>(
      history.as<float>(), history.shape[0], history.shape[1], most_recent, LargestOf(o.format), std::ldexp(1.0f, -o.margin),
      o.power_of_two, scale.as<float>(), inverse.as<float>());
  MB_CUDA_LAUNCHED();
}

template <class Pointer> Pointer* DataOf(const Tensor& tensor) { return tensor.empty() ? nullptr : tensor.as<Pointer>(); }

void Quantize(const Context& context, const Tensor& x, const ScaleSource& scale, Fp8Format format, const Tensor& rowwise,
              const Tensor& columnwise, const Tensor& amax) {
  const int64_t rows = x.shape[0], cols = x.shape[1];
  const bool nothing = rows == 0 || cols == 0;
  if (nothing && scale.scales == nullptr) return;
  if (rows > int64_t{65535} * kTile) ThrowEngineError("8-bit copy of {} rows", rows);
  const auto tiles = [&](int64_t side) { return nothing ? 1u : static_cast<unsigned>((side + kTile - 1) / kTile); };
  const dim3 grid(tiles(cols), tiles(rows));  // The scale of nothing is written too.
  WithType(x.dtype, [&]<class T>(T) {
    const auto kernel = format == Fp8Format::kE4M3 ? &QuantizeKernel<T, __NV_E4M3> : &QuantizeKernel<T, __NV_E5M2>;
    kernel<<<grid, kThreads, 0, StreamOf(context)>>>(static_cast<const T*>(x.data), scale, rows, cols, DataOf<uint8_t>(rowwise),
                                                     DataOf<uint8_t>(columnwise), DataOf<float>(amax));
  });
  MB_CUDA_LAUNCHED();
}

void QuantizeCuda(const Context& context, const Tensor& x, const Tensor& scale, Fp8Format format, const Tensor& rowwise,
                  const Tensor& columnwise, const Tensor& amax) {
  CheckFp8Quantize(x, scale, rowwise, columnwise);
  Quantize(context, x, {.given = scale.as<float>()}, format, rowwise, columnwise, amax);
}

void QuantizeByAmaxCuda(const Context& context, const Tensor& x, const Fp8ScaleOptions& o, const Tensor& scales,
                        const Tensor& rowwise, const Tensor& columnwise) {
  CheckFp8Quantize(x, {scales.data, DType::kF32, scales.device, {1}}, rowwise, columnwise);
  const ScaleSource source{nullptr, scales.as<float>(), LargestOf(o.format), std::ldexp(1.0f, -o.margin), o.power_of_two};
  Quantize(context, x, source, o.format, rowwise, columnwise, {});
}

const bool g_registered = (Fp8Amax.cuda = &AmaxCuda, Fp8DelayedScales.cuda = &DelayedScalesCuda,
                           Fp8Quantize.cuda = &QuantizeCuda, Fp8QuantizeByAmax.cuda = &QuantizeByAmaxCuda, true);

}  // namespace
}  // namespace mbridge::cuda
