#include "engine/ops/softmax_cross_entropy.h"

#include "engine/ops/cuda/online_softmax.h"

namespace mbridge::cuda {
namespace {

// A block a row. What fits is kept in shared memory between the pass that sums and the pass that writes the gradient; the rest
// was read last and is read again first, while it is still in the L2 cache. Rows may begin at any element: up to a vector's
// length is done one by one at both ends.
template <class T, bool kGradient>
__global__ void __launch_bounds__(1024) RowKernel(T* logits, int64_t n, const int32_t* labels, const float* weights,
                                                  DType gradient_precision, float* losses, int64_t capacity) {
  constexpr int kN = kVectorSize<T>, kUnroll = 4;
  extern __shared__ uint4 cache[];
  __shared__ float shared[32];
  const int64_t row = blockIdx.x, label = labels[row];
  const int thread = threadIdx.x, step = blockDim.x;
  T* z = logits + row * n;
  const float predicted = Widen(z[label]);
  // Vectors from element `head` on; the edges are the first threads' elements.
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(z) % 16 / sizeof(T));
  int64_t head = (kN - misaligned) % kN;
  if (head > n) head = n;
  const int64_t vectors = (n - head) / kN, tail = head + vectors * kN;
  const uint4* units = reinterpret_cast<const uint4*>(z + head);
  int64_t edge = -1;
  if (thread < head) edge = thread;
  if (thread >= kN && tail + thread - kN < n) edge = tail + thread - kN;
  const float edge_value = edge >= 0 ? Widen(z[edge]) : 0.0f;

  OnlineSoftmax<T> online;
  if (edge >= 0) online.Add({edge_value});
  for (int64_t base = thread; base < vectors; base += kUnroll * step) {
    Pack<T, kN> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (base + k * step < vectors) loaded[k].units[0] = units[base + k * step];
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t vector = base + k * step;
      if (vector >= vectors) continue;
      if (kGradient && vector < capacity) cache[vector] = loaded[k].units[0];
      float values[kN];
      Unpack(loaded[k], values);
      online.Add(values);
    }
  }
  online.Join(shared);
  if (thread == 0) losses[row] = logf(online.sum) - (predicted - online.maximum);
  if constexpr (kGradient) {
    const float weight = weights[row], inverse = 1.0f / online.sum, factor = inverse * weight;
    // The label's own element is one step away from the others' formula.
    const auto gradient = [&](float value, bool is_label) {
      const float power = ExpFor<T>(value - online.maximum);
      const float result = is_label ? (power * inverse - 1.0f) * weight : power * factor;
      return std::is_same_v<T, float> ? RoundTo(gradient_precision, result) : result;
    };
    const int64_t label_vector = label >= head ? (label - head) / kN : -1;
    const auto finish = [&](int64_t vector, const Pack<T, kN>& loaded) {
      float values[kN];
      Unpack(loaded, values);
      if (vector == label_vector) {
        const int hit = static_cast<int>((label - head) % kN);
#pragma unroll
        for (int i = 0; i < kN; ++i) values[i] = gradient(values[i], i == hit);
      } else {
#pragma unroll
        for (int i = 0; i < kN; ++i) values[i] = gradient(values[i], false);
      }
      StoreFloats<kN>(z + head + vector * kN, values);
    };
    const int64_t cached = capacity < vectors ? capacity : vectors;
    // Each thread reads the vectors that it read before.
    for (int64_t base = cached + (thread - cached % step + step) % step; base < vectors; base += kUnroll * step) {
      Pack<T, kN> loaded[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (base + k * step < vectors) loaded[k].units[0] = units[base + k * step];
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (base + k * step < vectors) finish(base + k * step, loaded[k]);
      }
    }
    for (int64_t vector = thread; vector < cached; vector += step) {
      Pack<T, kN> kept;
      kept.units[0] = cache[vector];
      finish(vector, kept);
    }
    if (edge >= 0) z[edge] = Narrow<T>(gradient(edge_value, edge == label));
  }
}

// Dynamic shared memory that a block may ask for.
int64_t SharedLimit() {
  static const int64_t limit = [] {
    int device = 0, bytes = 0;
    MB_CUDA(cudaGetDevice(&device));
    MB_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return int64_t{bytes} - 512;  // The static part.
  }();
  return limit;
}

template <class T, bool kGradient>
void Launch(const Context& context, const Tensor& logits, const Tensor& labels, const Tensor& weight, DType gradient_precision,
            const Tensor& loss) {
  const int64_t rows = labels.size(), n = logits.shape[1], vectors = n / kVectorSize<T>;
  static const bool raised = [] {
    MB_CUDA(cudaFuncSetAttribute(&RowKernel<T, kGradient>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(SharedLimit())));
    return true;
  }();
  static_cast<void>(raised);
  const int64_t capacity = kGradient ? std::min(vectors, SharedLimit() / 16) : 0;
  // Two rows in a multiprocessor, unless one fills its shared memory.
  const int64_t wanted = capacity * 16 > SharedLimit() / 2 ? 1024 : 512;
  const auto threads = static_cast<unsigned>(std::clamp<int64_t>((vectors / 2 + 31) / 32 * 32, 32, wanted));
  RowKernel<T, kGradient><<<static_cast<unsigned>(rows), threads, static_cast<size_t>(capacity) * 16, StreamOf(context)>>>(
      PointerOf<T>(logits), n, PointerOf<int32_t>(labels), PointerOf<float>(weight), gradient_precision, PointerOf<float>(loss),
      capacity);
  MB_CUDA_LAUNCHED();
}

void SoftmaxCrossEntropyCuda(const Context& context, const Tensor& logits, const Tensor& labels, const Tensor& weight,
                             DType gradient_precision, const Tensor& loss) {
  if (logits.dtype != gradient_precision && logits.dtype != DType::kF32) {
    ThrowEngineError("{} logits with a gradient of {}", NameOf(logits.dtype), NameOf(gradient_precision));
  }
  if (labels.size() == 0) return;
  if (labels.size() > INT32_MAX) ThrowEngineError("cross entropy of {} rows", labels.size());
  WithType(logits.dtype, [&]<class T>(T) {
    if (weight.empty()) {
      Launch<T, false>(context, logits, labels, weight, gradient_precision, loss);
    } else {
      Launch<T, true>(context, logits, labels, weight, gradient_precision, loss);
    }
  });
}

const bool g_registered = (SoftmaxCrossEntropy.cuda = &SoftmaxCrossEntropyCuda, true);

}  // namespace
}  // namespace mbridge::cuda
