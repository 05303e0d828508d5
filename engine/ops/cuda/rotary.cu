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

// The heads that are turned: of every group its queries and its key, which stand next to each other.
struct TurnedHeads {
  uint32_t count, per_group, head_size, group_width;
  __device__ __forceinline__ uint32_t ColumnOf(uint32_t head) const {
    return head / per_group * group_width + head % per_group * head_size;
  }
};

// A thread turns kN pairs of kHeads heads of one token, `apart` heads from each other, by the same sines; all of them are loaded
// before the first is stored. Few heads and few registers: many rounds of blocks leave a short tail. Threads: x over the pairs,
// y over the heads, z over the tokens.
constexpr int kHeads = 2;
template <class T, int kN, bool kInterleaved>
__global__ void __launch_bounds__(256)
    RotaryKernel(T* qkv, const float* cosine, const float* sine, uint32_t tokens, uint32_t batch, int64_t width,
                 const TurnedHeads heads, int half, float sign) {
  const uint32_t apart = (heads.count + kHeads - 1) / kHeads, first = blockIdx.y * blockDim.y + threadIdx.y;
  const uint32_t place = blockIdx.x * blockDim.z + threadIdx.z;
  const int j = static_cast<int>(blockIdx.z * blockDim.x + threadIdx.x) * kN;
  if (place >= tokens || first >= apart || j >= half) return;
  const uint32_t token = tokens - 1 - place;  // The last first: the product before left those in the L2 cache.
  T* const at = qkv + int64_t{token} * width + (kInterleaved ? 2 * j : j);
  const int second = kInterleaved ? kN : half;
  Pack<T, kN> lows[kHeads], highs[kHeads];
  uint32_t places[kHeads];
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    const uint32_t head = first + k * apart;
    if (head >= heads.count) continue;
    places[k] = heads.ColumnOf(head);
    lows[k] = LoadPack<kN>(at + places[k]);
    highs[k] = LoadPack<kN>(at + places[k] + second);
  }
  const int64_t table = int64_t{token / batch} * half + j;
  float c[kN], s[kN];
  LoadFloats<kN>(cosine + table, c);
  LoadFloats<kN>(sine + table, s);
#pragma unroll
  for (int i = 0; i < kN; ++i) s[i] *= sign;
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (first + k * apart >= heads.count) continue;
    float lo[kN], hi[kN], out_lo[kN], out_hi[kN];
    Unpack(lows[k], lo);
    Unpack(highs[k], hi);
    if constexpr (kInterleaved) Deal(lo, hi);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      out_lo[i] = __fadd_rn(Round<T>(__fmul_rn(lo[i], c[i])), Round<T>(__fmul_rn(-hi[i], s[i])));
      out_hi[i] = __fadd_rn(Round<T>(__fmul_rn(hi[i], c[i])), Round<T>(__fmul_rn(lo[i], s[i])));
    }
    if constexpr (kInterleaved) Undeal(out_lo, out_hi);
    StoreFloats<kN>(at + places[k], out_lo);
    StoreFloats<kN>(at + places[k] + second, out_hi);
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
      const TurnedHeads heads{static_cast<uint32_t>(turned), static_cast<uint32_t>(turned / layout.groups),
                              static_cast<uint32_t>(layout.head_size), static_cast<uint32_t>(layout.group_width())};
      const int64_t columns = (half + kN - 1) / kN, across = std::min<int64_t>(columns, 256),
                    apart = (turned + kHeads - 1) / kHeads;
      const int64_t most_down = 256 / across, head_tiles = (apart + most_down - 1) / most_down;
      const int64_t down = (apart + head_tiles - 1) / head_tiles;
      const int64_t together = std::clamp<int64_t>(256 / (across * down), 1, 64);  // Tokens of a block.
      const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(down), static_cast<unsigned>(together));
      const dim3 grid(static_cast<unsigned>((s * b + together - 1) / together), static_cast<unsigned>((apart + down - 1) / down),
                      static_cast<unsigned>((columns + across - 1) / across));
      if (s * b > INT32_MAX || grid.y > 65535) ThrowEngineError("rotary embedding of {} is too large", qkv.shape.ToString());
      const auto launch = [&](auto* kernel) {
        kernel<<<grid, block, 0, StreamOf(context)>>>(values, c, n, static_cast<uint32_t>(s * b), static_cast<uint32_t>(b),
                                                      layout.width(), heads, static_cast<int>(half), sign);
      };
      pairs == RotaryPairs::kInterleaved ? launch(&RotaryKernel<T, kN, true>) : launch(&RotaryKernel<T, kN, false>);
    };
    constexpr int kVector = kVectorSize<T>;
    if (half % kVector == 0 && layout.head_size % kVector == 0 && layout.group_width() % kVector == 0 &&
        AreAligned16(values, c, n)) {
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
