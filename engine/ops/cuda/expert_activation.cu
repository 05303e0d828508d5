#include "engine/ops/expert_activation.h"

#include "engine/ops/cuda/expert_tensors.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 128;  // Of a block that sums over a row.

// What the kernels use of the options. `fused` and the clamp are uniform over a grid.
struct Gate {
  float slope, limit, offset;
  bool fused;

  explicit Gate(const ExpertActivationOptions& o)
      : slope(o.gate == GateKind::kQuickGelu ? 1.702f : 1.0f),
        limit(o.clamp > 0.0f ? o.clamp : 3.4e38f),
        offset(o.linear_offset),
        fused(o.fused) {}

  template <class T> __device__ float Value(float x1, float x2, float p) const {
    const float u1 = fminf(x1, limit), u2 = fminf(fmaxf(x2, -limit), limit) + offset;
    const float g = u1 * Sigmoid<T>(slope * u1);
    return fused ? g * u2 * p : Round<T>(Round<T>(g) * Round<T>(u2)) * p;
  }
  // Gradients of both halves; returns the summand of the probability's.
  template <class T> __device__ float Backward(float x1, float x2, float p, float d, float* d_gate, float* d_linear) const {
    const float u1 = fminf(x1, limit), u2 = fminf(fmaxf(x2, -limit), limit) + offset;
    const float s = Sigmoid<T>(slope * u1), gate = fused ? u1 * s : Round<T>(u1 * s);
    const float weighted = fused ? d * p : Round<T>(d * p), d1 = weighted * u2;
    *d_gate = x1 > limit ? 0.0f : (fused ? d1 : Round<T>(d1)) * s * (1.0f + slope * u1 * (1.0f - s));
    *d_linear = x2 > limit || x2 < -limit ? 0.0f : weighted * gate;
    return d * (fused ? gate * u2 : Round<T>(gate * u2));
  }
};

struct NoColumns {};

// Bodies of RowsKernel (vectors.h).
template <class T, int kWidth> struct ForwardBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> gate, linear;
    float p;
  };
  const T* x;
  const int32_t* slots;
  const float* probabilities;
  T* y;
  int64_t n;
  Gate gate;
  __device__ NoColumns Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const {
    const T* from = x + row * 2 * n + column;
    return {LoadPack<kN>(from), LoadPack<kN>(from + n), probabilities[slots[row]]};
  }
  __device__ void Finish(const NoColumns&, const Row& loaded, int64_t row, int64_t column) const {
    float x1[kN], x2[kN];
    Unpack(loaded.gate, x1);
    Unpack(loaded.linear, x2);
#pragma unroll
    for (int i = 0; i < kN; ++i) x1[i] = gate.Value<T>(x1[i], x2[i], loaded.p);
    StoreFloats<kN>(y + row * n + column, x1);
  }
};

template <class T, int kN>
__global__ void __launch_bounds__(kThreads)
    BackwardKernel(const T* dy, const T* x, const int32_t* slots, const float* probabilities, const Gate gate, int64_t n,
                   bool round_sum, T* dx, float* d_probabilities) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const int32_t slot = slots[row];
  const float p = probabilities[slot];
  const T *from = x + row * 2 * n, *grad = dy + row * n;
  T* to = dx + row * 2 * n;
  float sum = 0.0f;
  for (int64_t j = int64_t{threadIdx.x} * kN; j < n; j += kThreads * kN) {
    float x1[kN], x2[kN], d[kN];
    LoadFloats<kN>(from + j, x1);
    LoadFloats<kN>(from + n + j, x2);
    LoadFloats<kN>(grad + j, d);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      float d_gate, d_linear;
      sum += gate.Backward<T>(x1[i], x2[i], p, d[i], &d_gate, &d_linear);
      x1[i] = d_gate;
      x2[i] = d_linear;
    }
    StoreFloats<kN>(to + j, x1);
    StoreFloats<kN>(to + n + j, x2);
  }
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) d_probabilities[slot] = round_sum ? Round<T>(sum) : sum;
}

// f(std::integral_constant<int, kN>()): vectors where width and addresses allow them.
template <class T, class F, class... Pointers> void WithVectors(int64_t width, F&& f, Pointers... pointers) {
  if (width % kVectorSize<T> == 0 && AreAligned16(pointers...)) return f(std::integral_constant<int, kVectorSize<T>>());
  f(std::integral_constant<int, 1>());
}

void ForwardCuda(const Context& context, const Tensor& x, const ExpertRows& rows, const Tensor& probabilities,
                 const ExpertActivationOptions& o, const Tensor& y) {
  CheckStorage(x, o.precision);
  const int64_t count = rows.slots.size(), n = y.size() / std::max<int64_t>(count, 1);
  if (x.size() != 2 * count * n) ThrowEngineError("gated activation of {} into {}", x.shape.ToString(), y.shape.ToString());
  WithType(x.dtype, [&]<class T>(T) {
    WithVectors<T>(
        n,
        [&]<int kN>(std::integral_constant<int, kN>) {
          LaunchRows<2>(context,
                        ForwardBody<T, kN>{PointerOf<T>(x), PointerOf<int32_t>(rows.slots), PointerOf<float>(probabilities),
                                           PointerOf<T>(y), n, Gate(o)},
                        count, n);
        },
        x.data, y.data);
  });
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const ExpertRows& rows, const Tensor& probabilities,
                  const ExpertActivationOptions& o, const Tensor& dx, const Tensor& d_probabilities) {
  CheckStorage(x, o.precision);
  const int64_t count = rows.slots.size(), n = dy.size() / std::max<int64_t>(count, 1);
  if (x.size() != 2 * count * n) ThrowEngineError("gated activation of {}, gradient {}", x.shape.ToString(), dy.shape.ToString());
  if (count == 0) return;
  WithType(x.dtype, [&]<class T>(T) {
    WithVectors<T>(
        n,
        [&]<int kN>(std::integral_constant<int, kN>) {
          BackwardKernel<T, kN><<<static_cast<unsigned>(count), kThreads, 0, StreamOf(context)>>>(
              PointerOf<T>(dy), PointerOf<T>(x), PointerOf<int32_t>(rows.slots), PointerOf<float>(probabilities), Gate(o), n,
              o.router_precision != DType::kF32, PointerOf<T>(dx), PointerOf<float>(d_probabilities));
        },
        dy.data, x.data, dx.data);
  });
  MB_CUDA_LAUNCHED();
}

template <class T, int kWidth> struct BiasBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> x, bias;
    float p;
  };
  T* x;
  const T* biases;
  int64_t stride;
  const int32_t *offsets, *slots;
  const float* probabilities;
  int experts;
  int64_t n;
  __device__ NoColumns Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const {
    const int expert = ExpertOf(offsets, experts, static_cast<int>(row));
    return {LoadPack<kN>(x + row * n + column), LoadPack<kN>(biases + expert * stride + column),
            probabilities == nullptr ? 1.0f : probabilities[slots[row]]};
  }
  __device__ void Finish(const NoColumns&, const Row& loaded, int64_t row, int64_t column) const {
    float values[kN], bias[kN];
    Unpack(loaded.x, values);
    Unpack(loaded.bias, bias);
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = __fadd_rn(values[i], Round<T>(__fmul_rn(bias[i], loaded.p)));
    StoreFloats<kN>(x + row * n + column, values);
  }
};

void BiasAddCuda(const Context& context, const Tensor& x, std::span<const Tensor> biases, const ExpertRows& rows,
                 const Tensor& probabilities, DType precision) {
  CheckStorage(x, precision);
  const int64_t stride = StrideOf(biases), n = biases[0].size(), count = rows.slots.size();
  if (x.size() != count * n) ThrowEngineError("biases of {} to {}", n, x.shape.ToString());
  WithType(x.dtype, [&]<class T>(T) {
    WithVectors<T>(
        n | stride,
        [&]<int kN>(std::integral_constant<int, kN>) {
          LaunchRows<2>(context,
                        BiasBody<T, kN>{PointerOf<T>(x), PointerOf<T>(biases[0]), stride, PointerOf<int32_t>(rows.offsets),
                                        PointerOf<int32_t>(rows.slots), PointerOf<float>(probabilities),
                                        static_cast<int>(biases.size()), n},
                        count, n);
        },
        x.data, biases[0].data);
  });
}

// Block (tile of 32 columns, expert): 8 warps share the expert's rows.
template <class T>
__global__ void __launch_bounds__(256) BiasSumsKernel(const T* dy, const int32_t* offsets, const int32_t* slots,
                                                      const float* probabilities, int64_t n, float* grads, int64_t stride) {
  __shared__ float shared[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  const int begin = offsets[blockIdx.y], end = offsets[blockIdx.y + 1];
  float sum = 0.0f;
  if (column < n) {
    for (int row = begin + warp; row < end; row += 8) {
      sum += Widen(dy[row * n + column]) * (probabilities == nullptr ? 1.0f : probabilities[slots[row]]);
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= n) return;
  for (int w = 1; w < 8; ++w) sum += shared[w][lane];
  grads[blockIdx.y * stride + column] += Round<T>(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    BiasProductsKernel(const T* dy, const T* biases, int64_t stride, const int32_t* offsets, const int32_t* slots, int experts,
                       int64_t n, float* d_probabilities) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const T *grad = dy + row * n, *bias = biases + ExpertOf(offsets, experts, static_cast<int>(row)) * stride;
  float sum = 0.0f;
  for (int64_t j = threadIdx.x; j < n; j += kThreads) sum += Widen(grad[j]) * Widen(bias[j]);
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) d_probabilities[slots[row]] += sum;
}

void BiasBackwardCuda(const Context& context, const Tensor& dy, std::span<const Tensor> biases, const ExpertRows& rows,
                      const Tensor& probabilities, DType precision, std::span<const Tensor> main_grads,
                      const Tensor& d_probabilities) {
  CheckStorage(dy, precision);
  const int64_t stride = StrideOf(biases), n = biases[0].size(), count = rows.slots.size();
  if (dy.size() != count * n || main_grads.size() != biases.size())
    ThrowEngineError("{} biases of {} for gradients {}", biases.size(), n, dy.shape.ToString());
  if (count == 0) return;
  const dim3 grid(static_cast<unsigned>((n + 31) / 32), static_cast<unsigned>(biases.size()));
  WithType(dy.dtype, [&]<class T>(T) {
    const int32_t *offsets = PointerOf<int32_t>(rows.offsets), *slots = PointerOf<int32_t>(rows.slots);
    BiasSumsKernel<<<grid, 256, 0, StreamOf(context)>>>(PointerOf<const T>(dy), offsets, slots, PointerOf<float>(probabilities),
                                                        n, PointerOf<float>(main_grads[0]), StrideOf(main_grads));
    MB_CUDA_LAUNCHED();
    if (probabilities.empty()) return;
    BiasProductsKernel<<<static_cast<unsigned>(count), kThreads, 0, StreamOf(context)>>>(
        PointerOf<const T>(dy), PointerOf<const T>(biases[0]), stride, offsets, slots, static_cast<int>(biases.size()), n,
        PointerOf<float>(d_probabilities));
    MB_CUDA_LAUNCHED();
  });
}

// Blocks of one token.
template <class T>
__global__ void __launch_bounds__(kThreads) SharedGateForwardKernel(const T* x, const float* logits, int64_t n, T* y) {
  const int64_t token = blockIdx.x;
  const float gate = Round<T>(Sigmoid<float>(Round<T>(logits[token])));
  for (int64_t j = threadIdx.x; j < n; j += kThreads) y[token * n + j] = Narrow<T>(Widen(x[token * n + j]) * gate);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    SharedGateBackwardKernel(const T* dy, const T* x, const float* logits, int64_t n, T* dx, float* d_logits) {
  __shared__ float shared[32];
  const int64_t token = blockIdx.x;
  const float gate = Round<T>(Sigmoid<float>(Round<T>(logits[token])));
  float sum = 0.0f;
  for (int64_t j = threadIdx.x; j < n; j += kThreads) {
    const float d = Widen(dy[token * n + j]);
    sum += d * Widen(x[token * n + j]);
    dx[token * n + j] = Narrow<T>(d * gate);
  }
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) d_logits[token] = Round<T>(Round<T>(sum) * gate * (1.0f - gate));
}

void SharedGateForwardCuda(const Context& context, const Tensor& x, const Tensor& logits, DType precision, const Tensor& y) {
  CheckStorage(x, precision);
  const int64_t tokens = logits.size(), n = x.size() / tokens;
  WithType(x.dtype, [&]<class T>(T) {
    SharedGateForwardKernel<<<static_cast<unsigned>(tokens), kThreads, 0, StreamOf(context)>>>(
        PointerOf<const T>(x), PointerOf<float>(logits), n, PointerOf<T>(y));
  });
  MB_CUDA_LAUNCHED();
}

void SharedGateBackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& logits, DType precision,
                            const Tensor& dx, const Tensor& d_logits) {
  CheckStorage(x, precision);
  const int64_t tokens = logits.size(), n = x.size() / tokens;
  WithType(x.dtype, [&]<class T>(T) {
    SharedGateBackwardKernel<<<static_cast<unsigned>(tokens), kThreads, 0, StreamOf(context)>>>(
        PointerOf<const T>(dy), PointerOf<const T>(x), PointerOf<float>(logits), n, PointerOf<T>(dx), PointerOf<float>(d_logits));
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered =
    (ExpertActivationForward.cuda = &ForwardCuda, ExpertActivationBackward.cuda = &BackwardCuda,
     ExpertBiasAdd.cuda = &BiasAddCuda, ExpertBiasBackward.cuda = &BiasBackwardCuda,
     SharedGateForward.cuda = &SharedGateForwardCuda, SharedGateBackward.cuda = &SharedGateBackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
