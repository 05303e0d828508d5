#include "engine/ops/rotary.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

// 2 kN neighbours (a then b) into evens (a) and odds (b).
template <int kN> __device__ __forceinline__ void Deal(float (&a)[kN], float (&b)[kN]) {
  float all[2 * kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    all[i] = a[i];
    all[kN + i] = b[i];
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    a[i] = all[2 * i];
    b[i] = all[2 * i + 1];
  }
}
template <int kN> __device__ __forceinline__ void Undeal(float (&a)[kN], float (&b)[kN]) {
  float all[2 * kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    all[2 * i] = a[i];
    all[2 * i + 1] = b[i];
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    a[i] = all[i];
    b[i] = all[kN + i];
  }
}

// A block turns one token. threadIdx.x walks over the pairs of a head, whose sines stay in registers; threadIdx.y over the heads:
// of every group its queries and its key, which stand next to each other.
template <class T, int kN, bool kInterleaved>
__global__ void RotaryKernel(T* qkv, const float* cosine, const float* sine, int64_t tokens, int batch, int groups, int turned,
                             int head_size, int half, float sign) {
  const int per_group = turned / groups;
  const int64_t width = int64_t{turned + groups} * head_size;
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    T* row = qkv + token * width;
    const int64_t table = token / batch * half;
    for (int j = threadIdx.x * kN; j < half; j += blockDim.x * kN) {
      float c[kN], s[kN];
      LoadFloats<kN>(cosine + table + j, c);
      LoadFloats<kN>(sine + table + j, s);
#pragma unroll
      for (int i = 0; i < kN; ++i) s[i] *= sign;
#pragma unroll 2
      for (int head = threadIdx.y; head < turned; head += blockDim.y) {
        T* at = row + (head / per_group * (per_group + 1) + head % per_group) * head_size + (kInterleaved ? 2 * j : j);
        T* second = at + (kInterleaved ? kN : half);
        float lo[kN], hi[kN], out_lo[kN], out_hi[kN];
        LoadFloats<kN>(at, lo);
        LoadFloats<kN>(second, hi);
        if constexpr (kInterleaved) Deal(lo, hi);
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          out_lo[i] = __fadd_rn(Round<T>(__fmul_rn(lo[i], c[i])), Round<T>(__fmul_rn(-hi[i], s[i])));
          out_hi[i] = __fadd_rn(Round<T>(__fmul_rn(hi[i], c[i])), Round<T>(__fmul_rn(lo[i], s[i])));
        }
        if constexpr (kInterleaved) Undeal(out_lo, out_hi);
        StoreFloats<kN>(at, out_lo);
        StoreFloats<kN>(second, out_hi);
      }
    }
  }
}

void RotaryCuda(const Context& context, const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const QkvLayout& layout,
                RotaryPairs pairs, RotaryDirection direction, DType precision) {
  CheckStorage(qkv, precision);
  const int64_t s = qkv.shape[0], b = qkv.shape[1], half = cosine.shape[1];
  if (qkv.shape[2] != layout.width() || cosine.shape[0] != s || 2 * half > layout.head_size) {
    ThrowEngineError("rotary tables {} for {} with heads of {}", cosine.shape.ToString(), qkv.shape.ToString(), layout.head_size);
  }
  if (s * b == 0 || half == 0) return;
  const float sign = direction == RotaryDirection::kForward ? 1.0f : -1.0f;
  const int64_t turned = layout.heads + layout.groups;
  WithType(qkv.dtype, [&]<class T>(T) {
    T* values = PointerOf<T>(qkv);
    const float *c = PointerOf<float>(cosine), *n = PointerOf<float>(sine);
    const auto run = [&]<int kN>(std::integral_constant<int, kN>) {
      const int64_t columns = std::min<int64_t>((half + kN - 1) / kN, 512);
      const int64_t passes = (turned * columns + 511) / 512;
      const int64_t heads = std::clamp<int64_t>((turned + passes - 1) / passes, 1, 512 / columns);
      const dim3 block(static_cast<unsigned>(columns), static_cast<unsigned>(heads));
      const auto grid = static_cast<unsigned>(std::min<int64_t>(s * b, INT32_MAX));
      const auto launch = [&](auto* kernel) {
        kernel<<<grid, block, 0, StreamOf(context)>>>(values, c, n, s * b, static_cast<int>(b), static_cast<int>(layout.groups),
                                                      static_cast<int>(turned), static_cast<int>(layout.head_size),
                                                      static_cast<int>(half), sign);
      };
      pairs == RotaryPairs::kInterleaved ? launch(&RotaryKernel<T, kN, true>) : launch(&RotaryKernel<T, kN, false>);
    };
    constexpr int kVector = kVectorSize<T>;
    if (half % kVector == 0 && layout.head_size % kVector == 0 && AreAligned16(values, c, n)) {
      run(std::integral_constant<int, kVector>());
    } else {
      run(std::integral_constant<int, 1>());
    }
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (Rotary.cuda = &RotaryCuda, true);

}  // namespace
}  // namespace mbridge::cuda
