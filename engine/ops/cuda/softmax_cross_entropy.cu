#include "engine/ops/softmax_cross_entropy.h"

#include <cooperative_groups.h>

#include <array>
#include <bit>

#include "engine/ops/cuda/async_copy.h"
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

// A cluster of blocks a row, each with `part` vectors of it in shared memory, so that the row is read once and written once.
// Clusters stay and go from row to row: what a thread has written of one row makes place for its copy of the next, so that reads
// and writes are under way all the time; without gradient, what it has read does. Rows are whole vectors, 16-byte aligned; the
// last part may be shorter or empty.
constexpr int kPartThreads = 512, kPartBytes = 76000, kMostParts = 8;  // Three parts in a multiprocessor.
template <class T, bool kGradient>
__global__ void __launch_bounds__(kPartThreads, 3)
    ClusterRowKernel(T* logits, int64_t rows, int64_t n, const int32_t* labels, const float* weights, float* losses, int part) {
  constexpr int kN = kVectorSize<T>, kHold = (kPartBytes / 16 + kPartThreads - 1) / kPartThreads;
  extern __shared__ uint4 cache[];
  __shared__ float2 of_warps[kPartThreads / 32], of_parts[2][kMostParts];
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), ranks = static_cast<int>(cluster.num_blocks());
  const int first = rank * part, whole = static_cast<int>(n / kN), count = max(0, min(part, whole - first));
  const int64_t clusters = gridDim.x / ranks;
  const auto fetch = [&](int64_t row, int vector) {
    CopyAsync16(&cache[vector], logits + row * n + int64_t{first + vector} * kN);
  };
  int64_t row = blockIdx.x / ranks;
#pragma unroll
  for (int k = 0; k < kHold; ++k) {
    const int vector = threadIdx.x + k * kPartThreads;
    if (vector < count) fetch(row, vector);
    CommitCopies();
  }
  cluster.sync();  // All blocks run before one writes into another.
  for (int turn = 0; row < rows; row += clusters, turn ^= 1) {
    const int label = labels[row] - first * kN;  // Inside of this part, if it is there.
    const float weight = kGradient ? weights[row] : 0.0f;
    const int64_t next = row + clusters;
    FastOnlineSoftmax online;
    float predicted = 0.0f;
    if (!kGradient && threadIdx.x == 0 && rank == 0) predicted = Widen(logits[row * n + labels[row]]);
    ForEachIndex<kHold>([&]<int k>(std::integral_constant<int, k>) {
      WaitForCopies<kGradient ? kHold - 1 - k : kHold - 1>();
      const int vector = threadIdx.x + k * kPartThreads;
      if (vector < count) {
        Pack<T, kN> loaded;
        loaded.units[0] = cache[vector];
        float values[kN];
        Unpack(loaded, values);
        online.Add(values);
        if (!kGradient && next < rows) fetch(next, vector);
      }
      if constexpr (!kGradient) CommitCopies();
    });
    online.JoinWarp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = {online.maximum, online.sum};
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr int kWarps = kPartThreads / 32;
      if (threadIdx.x < kWarps) {
        online.maximum = of_warps[threadIdx.x].x;
        online.sum = of_warps[threadIdx.x].y;
      } else {
        online = {};
      }
      online.JoinWarp();
      // That of the row after the next comes after the next row's barrier, and so after everybody has read this one.
      if (threadIdx.x < ranks) *cluster.map_shared_rank(&of_parts[turn][rank], threadIdx.x) = {online.maximum, online.sum};
    }
    cluster.sync();
    // In the order of the parts, the same in every block.
    FastOnlineSoftmax all;
    for (int other = 0; other < ranks; ++other) all.Join(of_parts[turn][other].x, of_parts[turn][other].y);
    if constexpr (!kGradient) {
      if (threadIdx.x == 0 && rank == 0) losses[row] = logf(all.sum) - (predicted - all.maximum);
      continue;
    }
    const float inverse = 1.0f / all.sum, factor = inverse * weight, scaled = all.maximum * FastOnlineSoftmax::kLog2E;
    const int label_vector = label >= 0 && label < count * kN ? label / kN : -1;
    T* const z = logits + row * n + int64_t{first} * kN;
#pragma unroll 2
    for (int k = 0; k < kHold; ++k) {
      const int vector = threadIdx.x + k * kPartThreads;
      if (vector < count) {
        Pack<T, kN> kept;
        kept.units[0] = cache[vector];
        float values[kN];
        Unpack(kept, values);
        if (vector == label_vector) {
          const int hit = label % kN;
#pragma unroll
          for (int i = 0; i < kN; ++i) {
            if (i == hit) predicted = values[i];
            const float power = FastOnlineSoftmax::Power(values[i], scaled);
            values[i] = i == hit ? (power * inverse - 1.0f) * weight : power * factor;
          }
          losses[row] = logf(all.sum) - (predicted - all.maximum);
        } else {
#pragma unroll
          for (int i = 0; i < kN; ++i) values[i] = FastOnlineSoftmax::Power(values[i], scaled) * factor;
        }
        StoreFloats<kN>(z + int64_t{vector} * kN, values);
        if (next < rows) fetch(next, vector);
      }
      CommitCopies();
    }
  }
}

// False where a row does not suit clusters.
template <class T, bool kGradient>
bool LaunchClusters(const Context& context, const Tensor& logits, const Tensor& labels, const Tensor& weight,
                    const Tensor& loss) {
  constexpr int kN = kVectorSize<T>, kNarrow = 8192;
  constexpr auto kKernel = &ClusterRowKernel<T, kGradient>;
  const int64_t n = logits.shape[1], vectors = n / kN;
  if (n % kN != 0 || n < kNarrow || !AreAligned16(logits.data)) return false;
  int64_t blocks = 1;
  while (blocks < kMostParts && (vectors + blocks - 1) / blocks * 16 > kPartBytes) blocks *= 2;
  const int64_t part = (vectors + blocks - 1) / blocks;
  if (part * 16 > kPartBytes) return false;
  if (!kGradient && blocks > 2) return false;  // Reading alone needs no cache: a wide row hides a block's end of a row by itself.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kPartThreads);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto set_clusters = [&](int64_t clusters, int64_t size) {
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(clusters * size));
  };
  // Clusters of 1, 2, 4 and 8 blocks with full parts that the device runs at once.
  static const std::array<int, 4> resident = [&] {
    MB_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPartBytes));
    MB_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    config.dynamicSmemBytes = kPartBytes;
    std::array<int, 4> most{};
    for (int i = 0; i < 4; ++i) {
      set_clusters(132, int64_t{1} << i);
      MB_CUDA(cudaOccupancyMaxActiveClusters(&most[i], kKernel, &config));
      if (most[i] < 1) ThrowEngineError("the device runs no clusters of {} blocks", 1 << i);
    }
    return most;
  }();
  const int64_t rows = labels.size();
  set_clusters(std::min<int64_t>(rows, resident[std::countr_zero(static_cast<uint64_t>(blocks))]), blocks);
  config.dynamicSmemBytes = static_cast<size_t>(part) * 16;
  config.stream = StreamOf(context);
  const float* const weights = kGradient ? PointerOf<float>(weight) : nullptr;
  MB_CUDA(cudaLaunchKernelEx(&config, kKernel, PointerOf<T>(logits), rows, n,
                             static_cast<const int32_t*>(PointerOf<int32_t>(labels)), weights, PointerOf<float>(loss),
                             static_cast<int>(part)));
  return true;
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
    const auto launch = [&]<bool kGradient>(std::bool_constant<kGradient>) {
      if constexpr (!std::is_same_v<T, float>) {
        if (LaunchClusters<T, kGradient>(context, logits, labels, weight, loss)) return;
      }
      Launch<T, kGradient>(context, logits, labels, weight, gradient_precision, loss);
    };
    weight.empty() ? launch(std::false_type()) : launch(std::true_type());
  });
}

const bool g_registered = (SoftmaxCrossEntropy.cuda = &SoftmaxCrossEntropyCuda, true);

}  // namespace
}  // namespace mbridge::cuda
