#include "engine/optim/update_ops.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256, kN = 4;

// Sum over the block, in thread 0. `shared` holds 8 doubles.
__device__ double SumInFirstThread(double x, double* shared) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) x += shared[warp];
  }
  return x;
}

// f(value) for this thread's elements of a piece; 16 bytes at once where they are aligned.
template <class T, class F> __device__ __forceinline__ void ForEach(const T* x, int count, F&& f) {
  const int whole = reinterpret_cast<uintptr_t>(x) % (kN * sizeof(T)) == 0 ? count / kN * kN : 0;
#pragma unroll 4
  for (int i = threadIdx.x * kN; i < whole; i += kThreads * kN) {
    float values[kN];
    LoadFloats<kN>(x + i, values);
#pragma unroll
    for (int k = 0; k < kN; ++k) f(values[k]);
  }
  for (int i = whole + threadIdx.x; i < count; i += kThreads) f(Widen(x[i]));
}

// A block a piece, here and below.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SquaresKernel(const T* data, int64_t origin, const UpdatePiece* pieces, float scale, double* sums) {
  __shared__ double shared[kThreads / 32];
  const UpdatePiece piece = pieces[blockIdx.x];
  double sum = 0;
  ForEach(data + (piece.begin - origin), piece.count, [&](float x) {
    const auto value = static_cast<double>(__fmul_rn(x, scale));
    sum += value * value;
  });
  sum = SumInFirstThread(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) TotalsKernel(const double* sums, const int64_t* firsts, double* totals) {
  __shared__ double shared[kThreads / 32];
  const int64_t end = firsts[blockIdx.x + 1];
  double sum = 0;
  for (int64_t i = firsts[blockIdx.x] + threadIdx.x; i < end; i += kThreads) sum += sums[i];
  sum = SumInFirstThread(sum, shared);
  if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    ZerosKernel(const float* data, int64_t origin, const UpdatePiece* pieces, unsigned long long* count) {
  const UpdatePiece piece = pieces[blockIdx.x];
  int zeros = 0;
  ForEach(data + (piece.begin - origin), piece.count, [&](float x) { zeros += x == 0.0f ? 1 : 0; });
  zeros = __reduce_add_sync(0xffffffffu, zeros);
  // A sum of integers is the same in any order.
  if (threadIdx.x % 32 == 0 && zeros != 0) atomicAdd(count, static_cast<unsigned long long>(zeros));
}

unsigned GridFor(const PieceList& list) {
  if (list.count > INT32_MAX) ThrowEngineError("{} pieces of the optimizer", list.count);
  return static_cast<unsigned>(list.count);
}

void SumOfSquaresCuda(const Context& context, const Tensor& data, int64_t origin, const PieceList& list, float scale,
                      const Tensor& sums) {
  if (list.count == 0) return;
  WithType(data.dtype, [&]<class T>(T) {
    SquaresKernel<<<GridFor(list), kThreads, 0, StreamOf(context)>>>(static_cast<const T*>(data.data), origin, list.pieces, scale,
                                                                     sums.as<double>());
  });
  MB_CUDA_LAUNCHED();
}

void SumByParameterCuda(const Context& context, const Tensor& sums, const Tensor& firsts, const Tensor& totals) {
  if (totals.size() == 0) return;
  TotalsKernel<<<static_cast<unsigned>(totals.size()), kThreads, 0, StreamOf(context)>>>(sums.as<double>(), firsts.as<int64_t>(),
                                                                                         totals.as<double>());
  MB_CUDA_LAUNCHED();
}

void CountZerosCuda(const Context& context, const Tensor& data, int64_t origin, const PieceList& list, const Tensor& count) {
  static_assert(sizeof(unsigned long long) == sizeof(int64_t));
  auto* total = reinterpret_cast<unsigned long long*>(count.as<int64_t>());
  MB_CUDA(cudaMemsetAsync(total, 0, sizeof(*total), StreamOf(context)));
  if (list.count == 0) return;
  ZerosKernel<<<GridFor(list), kThreads, 0, StreamOf(context)>>>(data.as<float>(), origin, list.pieces, total);
  MB_CUDA_LAUNCHED();
}

// Factors with what is decided once a step.
struct Factors {
  AdamFactors f;
  float first_keep;
  bool decay_gradient, lerp_from_end;
};
Factors FactorsOf(const AdamFactors& f) {
  return {f, 1.0f - f.first_weight, f.gradient_decay != 0.0f, std::fabs(f.first_weight) >= 0.5f};
}

// adam.cc's loop body; no operation may be contracted.
__device__ __forceinline__ void UpdateElement(const Factors& a, float gradient, float& first, float& second, float& master) {
  const AdamFactors& f = a.f;
  float p = master, g = __fmul_rn(__fmul_rn(gradient, f.gradient_scale), f.clip);
  if (a.decay_gradient) {
    g = __fadd_rn(g, __fmul_rn(f.gradient_decay, p));
  } else {
    p = __fmul_rn(p, f.decay_multiplier);
  }
  first = a.lerp_from_end ? __fsub_rn(g, __fmul_rn(__fsub_rn(g, first), a.first_keep))
                          : __fadd_rn(first, __fmul_rn(f.first_weight, __fsub_rn(g, first)));
  second = __fadd_rn(__fmul_rn(second, f.second_keep), __fmul_rn(f.second_weight, __fmul_rn(g, g)));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), f.root_correction), f.eps);
  master = __fadd_rn(p, __fmul_rn(f.negative_step, __fdiv_rn(first, denominator)));
}

struct Pointers {
  const float* gradient;
  void *first, *second;  // From `origin` on, like master and remainder.
  float* master;         // Null: split into value and remainder.
  void* value;           // Null: the master is the value.
  uint16_t* remainder;
  int64_t origin;
};

// How a master lies in memory.
enum class Master { kAlone, kWithValue, kSplit };

// kCount neighbouring elements' state in registers. V: the value's type, M: the moments'.
template <class V, class M, Master kMaster, int kCount> struct Elements {
  static constexpr bool kSplit = kMaster == Master::kSplit, kValue = kMaster == Master::kWithValue;
  Pack<float, kCount> gradient, master;
  Pack<M, kCount> first, second;
  Pack<V, kSplit ? kCount : 1> value;
  Pack<uint16_t, kSplit ? kCount : 1> remainder;

  __device__ __forceinline__ void Load(const Pointers& at, int64_t i) {
    const int64_t local = i - at.origin;
    gradient = LoadPack<kCount>(at.gradient + i);
    first = LoadPack<kCount>(static_cast<const M*>(at.first) + local);
    second = LoadPack<kCount>(static_cast<const M*>(at.second) + local);
    if constexpr (kSplit) {
      value = LoadPack<kCount>(static_cast<const V*>(at.value) + i);
      remainder = LoadPack<kCount>(static_cast<const uint16_t*>(at.remainder) + local);
    } else {
      master = LoadPack<kCount>(static_cast<const float*>(at.master) + local);
    }
  }

  __device__ __forceinline__ void UpdateAndStore(const Pointers& at, int64_t i, const Factors& factors) const {
    const int64_t local = i - at.origin;
    float g[kCount], m[kCount], v[kCount], p[kCount];
    Unpack(gradient, g);
    Unpack(first, m);
    Unpack(second, v);
    if constexpr (kSplit) {
      uint16_t upper[kCount], lower[kCount];
      memcpy(upper, value.units, sizeof(upper));
      memcpy(lower, remainder.units, sizeof(lower));
#pragma unroll
      for (int k = 0; k < kCount; ++k) p[k] = __uint_as_float((uint32_t{upper[k]} - (lower[k] >> 15)) << 16 | lower[k]);
    } else {
      Unpack(master, p);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) UpdateElement(factors, g[k], m[k], v[k], p[k]);
    StoreFloats<kCount>(static_cast<M*>(at.first) + local, m);
    StoreFloats<kCount>(static_cast<M*>(at.second) + local, v);
    if constexpr (kSplit) {
      uint16_t upper[kCount], lower[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = __float_as_uint(p[k]);
        upper[k] = static_cast<uint16_t>((bits >> 16) + (bits >> 15 & 1u));
        lower[k] = static_cast<uint16_t>(bits);
      }
      Pack<uint16_t, kCount> stored;
      memcpy(stored.units, upper, sizeof(upper));
      StorePack(static_cast<uint16_t*>(at.value) + i, stored);
      memcpy(stored.units, lower, sizeof(lower));
      StorePack(at.remainder + local, stored);
    } else {
      StoreFloats<kCount>(at.master + local, p);
      if constexpr (kValue) StoreFloats<kCount>(static_cast<V*>(at.value) + i, p);
    }
  }
};

template <class V, class M, Master kMaster>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const Pointers at, const UpdatePiece* pieces, bool aligned, const Factors decay, const Factors no_decay) {
  constexpr int kUnroll = 2;
  const UpdatePiece piece = pieces[blockIdx.x];
  const Factors factors = piece.decays != 0 ? decay : no_decay;
  const int whole = aligned && piece.begin % kN == 0 ? piece.count / kN * kN : 0;
  for (int base = threadIdx.x * kN; base < whole; base += kThreads * kN * kUnroll) {
    Elements<V, M, kMaster, kN> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kThreads * kN;
      if (i < whole) loaded[u].Load(at, piece.begin + i);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kThreads * kN;
      if (i < whole) loaded[u].UpdateAndStore(at, piece.begin + i, factors);
    }
  }
  for (int i = whole + threadIdx.x; i < piece.count; i += kThreads) {
    Elements<V, M, kMaster, 1> loaded;
    loaded.Load(at, piece.begin + i);
    loaded.UpdateAndStore(at, piece.begin + i, factors);
  }
}

// f(V(), M(), the kind of master as an integral constant).
template <class F> void WithElements(const AdamBuffers& b, F&& f) {
  const auto with_moments = [&](auto value, auto master) {
    b.first.dtype == DType::kBF16 ? f(value, __nv_bfloat16(), master) : f(value, float(), master);
  };
  if (!b.remainder.empty()) {
    return with_moments(__nv_bfloat16(), std::integral_constant<Master, Master::kSplit>());
  }
  if (b.value.empty()) return with_moments(float(), std::integral_constant<Master, Master::kAlone>());
  const std::integral_constant<Master, Master::kWithValue> with_value;
  b.value.dtype == DType::kBF16 ? with_moments(__nv_bfloat16(), with_value) : with_moments(__half(), with_value);
}

void UpdatePiecesCuda(const Context& context, const AdamBuffers& b, const PieceList& list, const AdamFactors& decay,
                      const AdamFactors& no_decay) {
  if (list.count == 0) return;
  const bool split = !b.remainder.empty();
  if (b.first.dtype != b.second.dtype || (split && b.value.dtype != DType::kBF16)) {
    ThrowEngineError("optimizer state of {} and {} for {} values", NameOf(b.first.dtype), NameOf(b.second.dtype),
                     NameOf(b.value.dtype));
  }
  const Pointers at{b.gradient.as<float>(),
                    b.first.data,
                    b.second.data,
                    split ? nullptr : b.master.as<float>(),
                    b.value.data,
                    static_cast<uint16_t*>(b.remainder.data),
                    b.origin};
  const bool aligned = AreAligned16(at.gradient, at.first, at.second, at.master, at.value, at.remainder) && b.origin % kN == 0;
  WithElements(b, [&]<class V, class M, Master kMaster>(V, M, std::integral_constant<Master, kMaster>) {
    UpdateKernel<V, M, kMaster>
        <<<GridFor(list), kThreads, 0, StreamOf(context)>>>(at, list.pieces, aligned, FactorsOf(decay), FactorsOf(no_decay));
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (SumOfSquares.cuda = &SumOfSquaresCuda, SumByParameter.cuda = &SumByParameterCuda,
                           CountZeros.cuda = &CountZerosCuda, UpdatePieces.cuda = &UpdatePiecesCuda, true);

}  // namespace
}  // namespace mbridge::cuda
