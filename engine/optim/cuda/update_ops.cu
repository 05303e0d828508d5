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
template <class F> __device__ __forceinline__ void ForEach(const float* x, int count, F&& f) {
  const int whole = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? count / kN * kN : 0;
#pragma unroll 4
  for (int i = threadIdx.x * kN; i < whole; i += kThreads * kN) {
    float values[kN];
    LoadFloats<kN>(x + i, values);
#pragma unroll
    for (int k = 0; k < kN; ++k) f(values[k]);
  }
  for (int i = whole + threadIdx.x; i < count; i += kThreads) f(x[i]);
}

// A block a piece, here and below.
__global__ void __launch_bounds__(kThreads)
    SquaresKernel(const float* data, int64_t origin, const UpdatePiece* pieces, float scale, double* sums) {
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
  SquaresKernel<<<GridFor(list), kThreads, 0, StreamOf(context)>>>(data.as<float>(), origin, list.pieces, scale,
                                                                   sums.as<double>());
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
  float *first, *second, *master;  // From `origin` on.
  void* value;                     // Null: the master is the value.
  int64_t origin;
};

// T: the model's type.
template <class T>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const Pointers at, const UpdatePiece* pieces, const Factors decay, const Factors no_decay) {
  constexpr bool kRounded = !std::is_same_v<T, float>;
  constexpr int kUnroll = 2;
  const UpdatePiece piece = pieces[blockIdx.x];
  const Factors& factors = piece.decays != 0 ? decay : no_decay;
  const int64_t local = piece.begin - at.origin;
  const float* gradient = at.gradient + piece.begin;
  float *first = at.first + local, *second = at.second + local, *master = at.master + local;
  T* value = static_cast<T*>(at.value) + (kRounded ? piece.begin : 0);
  const auto aligned = [](const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; };
  const bool vectors = aligned(gradient, 16) && aligned(first, 16) && aligned(second, 16) && aligned(master, 16) &&
                       (!kRounded || aligned(value, 8));
  const int whole = vectors ? piece.count / kN * kN : 0;
  for (int base = threadIdx.x * kN; base < whole; base += kThreads * kN * kUnroll) {
    Pack<float, kN> g[kUnroll], m[kUnroll], v[kUnroll], p[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kThreads * kN;
      if (i >= whole) continue;
      g[u] = LoadPack<kN>(gradient + i);
      m[u] = LoadPack<kN>(first + i);
      v[u] = LoadPack<kN>(second + i);
      p[u] = LoadPack<kN>(master + i);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kThreads * kN;
      if (i >= whole) continue;
      float gs[kN], ms[kN], vs[kN], ps[kN];
      Unpack(g[u], gs);
      Unpack(m[u], ms);
      Unpack(v[u], vs);
      Unpack(p[u], ps);
#pragma unroll
      for (int k = 0; k < kN; ++k) UpdateElement(factors, gs[k], ms[k], vs[k], ps[k]);
      StoreFloats<kN>(first + i, ms);
      StoreFloats<kN>(second + i, vs);
      StoreFloats<kN>(master + i, ps);
      if constexpr (kRounded) StoreFloats<kN>(value + i, ps);
    }
  }
  for (int i = whole + threadIdx.x; i < piece.count; i += kThreads) {
    float m = first[i], v = second[i], p = master[i];
    UpdateElement(factors, gradient[i], m, v, p);
    first[i] = m;
    second[i] = v;
    master[i] = p;
    if constexpr (kRounded) value[i] = Narrow<T>(p);
  }
}

void UpdatePiecesCuda(const Context& context, const AdamBuffers& buffers, const PieceList& list, const AdamFactors& decay,
                      const AdamFactors& no_decay) {
  if (list.count == 0) return;
  const Pointers at{buffers.gradient.as<float>(), buffers.first.as<float>(), buffers.second.as<float>(),
                    buffers.master.as<float>(),   buffers.value.data,        buffers.origin};
  WithType(buffers.value.empty() ? DType::kF32 : buffers.value.dtype, [&]<class T>(T) {
    UpdateKernel<T><<<GridFor(list), kThreads, 0, StreamOf(context)>>>(at, list.pieces, FactorsOf(decay), FactorsOf(no_decay));
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (SumOfSquares.cuda = &SumOfSquaresCuda, SumByParameter.cuda = &SumByParameterCuda,
                           CountZeros.cuda = &CountZerosCuda, UpdatePieces.cuda = &UpdatePiecesCuda, true);

}  // namespace
}  // namespace mbridge::cuda
