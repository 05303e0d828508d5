#include "engine/ops/cuda/column_sums.h"
#include "engine/ops/rms_norm.h"

namespace mbridge::cuda {
namespace {

// `lanes` neighbouring threads (a power of two) share a head; a thread holds kHold vectors of kN of its elements. Positions in a
// row: for each group its queries, its key, its value.
struct Heads {
  int64_t rows;
  int groups, per_group, size;
  float epsilon, gamma_offset;
  int lanes;
  __device__ int positions() const { return groups * (per_group + 2); }
  // Place of a head in rstd [rows, heads + groups].
  __device__ int64_t RstdAt(int64_t row, int group, int within) const {
    const int heads = groups * per_group;
    return row * (heads + groups) + (within < per_group ? group * per_group + within : heads + group);
  }
};

__device__ __forceinline__ float SumOfLanes(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

template <class T, int kN, int kHold>
__global__ void __launch_bounds__(256)
    ForwardKernel(const T* qkv, const T* query_gamma, const T* key_gamma, const Heads heads, T* y, float* rstds) {
  const int lane = threadIdx.x % heads.lanes, per_pass = blockDim.x / heads.lanes, positions = heads.positions();
  const int64_t row = blockIdx.x, width = int64_t{positions} * heads.size;
  // Every thread of a warp makes every pass: the shuffles need all of them.
  for (int first = 0; first < positions; first += per_pass) {
    const int position = first + threadIdx.x / heads.lanes;
    const bool inside = position < positions;
    const int group = position / (heads.per_group + 2), within = position % (heads.per_group + 2);
    const int64_t at = row * width + int64_t{position} * heads.size;
    Pack<T, kN> in[kHold];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int j = (lane + k * heads.lanes) * kN;
      if (!inside || j >= heads.size) continue;
      in[k] = LoadPack<kN>(qkv + at + j);
      float values[kN];
      Unpack(in[k], values);
#pragma unroll
      for (int i = 0; i < kN; ++i) squares += values[i] * values[i];
    }
    squares = SumOfLanes(squares, heads.lanes);
    if (!inside) continue;
    const bool is_value = within > heads.per_group;
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(heads.size) + heads.epsilon);
    const T* scale = within < heads.per_group ? query_gamma : key_gamma;
#pragma unroll
    for (int k = 0; k < kHold; ++k) {
      const int j = (lane + k * heads.lanes) * kN;
      if (j >= heads.size) continue;
      if (is_value) {
        StorePack(y + at + j, in[k]);
        continue;
      }
      float values[kN], gamma[kN];
      Unpack(in[k], values);
      LoadFloats<kN>(scale + j, gamma);
#pragma unroll
      for (int i = 0; i < kN; ++i) values[i] = values[i] * rstd * (gamma[i] + heads.gamma_offset);
      StoreFloats<kN>(y + at + j, values);
    }
    if (lane == 0 && !is_value) rstds[heads.RstdAt(row, group, within)] = rstd;
  }
}

// partials [blocks, queries' and keys', size]. Dynamic shared memory: two rows of `size` floats.
template <class T, int kN, int kHold>
__global__ void __launch_bounds__(256) BackwardKernel(T* gradient, const T* qkv, const T* query_gamma, const T* key_gamma,
                                                      const Heads heads, const float* rstds, float* partials) {
  extern __shared__ float totals[];
  const int lane = threadIdx.x % heads.lanes, per_pass = blockDim.x / heads.lanes, positions = heads.positions();
  const int64_t width = int64_t{positions} * heads.size;
  float query_sums[kHold][kN] = {}, key_sums[kHold][kN] = {};
  for (int64_t row = blockIdx.x; row < heads.rows; row += gridDim.x) {
    for (int first = 0; first < positions; first += per_pass) {
      const int position = first + threadIdx.x / heads.lanes;
      const int group = position / (heads.per_group + 2), within = position % (heads.per_group + 2);
      const bool inside = position < positions && within <= heads.per_group, is_query = within < heads.per_group;
      const int64_t at = row * width + int64_t{position} * heads.size;
      const float rstd = inside ? rstds[heads.RstdAt(row, group, within)] : 0.0f;
      const T* scale = is_query ? query_gamma : key_gamma;
      Pack<T, kN> g[kHold], in[kHold], gammas[kHold];
      float dot = 0.0f;
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        const int j = (lane + k * heads.lanes) * kN;
        if (!inside || j >= heads.size) continue;
        g[k] = LoadPack<kN>(gradient + at + j);
        in[k] = LoadPack<kN>(qkv + at + j);
        gammas[k] = LoadPack<kN>(scale + j);
      }
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        if (!inside || (lane + k * heads.lanes) * kN >= heads.size) continue;
        float d[kN], values[kN], gamma[kN];
        Unpack(g[k], d);
        Unpack(in[k], values);
        Unpack(gammas[k], gamma);
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          const float normal = values[i] * rstd, product = d[i] * normal;
          dot += d[i] * (gamma[i] + heads.gamma_offset) * normal;
          query_sums[k][i] += is_query ? product : 0.0f;
          key_sums[k][i] += is_query ? 0.0f : product;
        }
      }
      const float mean_dot = SumOfLanes(dot, heads.lanes) / static_cast<float>(heads.size);
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        const int j = (lane + k * heads.lanes) * kN;
        if (!inside || j >= heads.size) continue;
        float d[kN], values[kN], gamma[kN];
        Unpack(g[k], d);
        Unpack(in[k], values);
        Unpack(gammas[k], gamma);
#pragma unroll
        for (int i = 0; i < kN; ++i) d[i] = rstd * (d[i] * (gamma[i] + heads.gamma_offset) - values[i] * rstd * mean_dot);
        StoreFloats<kN>(gradient + at + j, d);
      }
    }
  }
  for (int turn = 0; turn < per_pass; ++turn) {  // One head's threads after the other.
    if (threadIdx.x / heads.lanes == turn) {
#pragma unroll
      for (int k = 0; k < kHold; ++k) {
        const int j = (lane + k * heads.lanes) * kN;
        if (j >= heads.size) continue;
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          totals[j + i] = turn == 0 ? query_sums[k][i] : totals[j + i] + query_sums[k][i];
          totals[heads.size + j + i] = turn == 0 ? key_sums[k][i] : totals[heads.size + j + i] + key_sums[k][i];
        }
      }
    }
    __syncthreads();
  }
  for (int j = threadIdx.x; j < 2 * heads.size; j += blockDim.x) partials[int64_t{blockIdx.x} * 2 * heads.size + j] = totals[j];
}

// f(vector size, vectors a thread) with heads.lanes set.
template <class T, class F> void WithHeads(Heads* heads, bool aligned, F&& f) {
  constexpr int kVector = kVectorSize<T>;
  const auto lanes_for = [](int64_t count) {
    int lanes = 1;
    while (lanes < 32 && lanes < count) lanes *= 2;
    return lanes;
  };
  if (aligned && heads->size % kVector == 0 && heads->size <= 64 * kVector) {
    const int vectors = heads->size / kVector;
    heads->lanes = lanes_for(vectors);
    if (vectors <= 32) return f(std::integral_constant<int, kVector>(), std::integral_constant<int, 1>());
    return f(std::integral_constant<int, kVector>(), std::integral_constant<int, 2>());
  }
  heads->lanes = 32;
  if (heads->size <= 256) return f(std::integral_constant<int, 1>(), std::integral_constant<int, 8>());
  if (heads->size <= 1024) return f(std::integral_constant<int, 1>(), std::integral_constant<int, 32>());
  ThrowEngineError("query-key norm of heads of {}, at most 1024", heads->size);
}

// kProjection: a block a token; all queries are one vector, all keys another.
__device__ __forceinline__ int64_t ColumnOf(const Heads& heads, bool is_key, int head) {
  const int group = is_key ? head : head / heads.per_group, within = is_key ? heads.per_group : head % heads.per_group;
  return int64_t{group * (heads.per_group + 2) + within} * heads.size;
}
__device__ __forceinline__ int64_t PlaceOf(const Heads& heads, int64_t row, bool is_key, int i) {
  return row * heads.positions() * heads.size + ColumnOf(heads, is_key, i / heads.size) + i % heads.size;
}

// The length of a token's queries or keys, and their sums over the block's threads.
__device__ __forceinline__ int LengthOf(const Heads& heads, bool is_key) {
  return heads.groups * (is_key ? 1 : heads.per_group) * heads.size;
}
template <class T>
__device__ __forceinline__ float SquaresOf(const T* qkv, const Heads& heads, int64_t row, bool is_key, float* shared) {
  float squares = 0.0f;
  for (int i = threadIdx.x; i < LengthOf(heads, is_key); i += blockDim.x) {
    const float value = Widen(qkv[PlaceOf(heads, row, is_key, i)]);
    squares += value * value;
  }
  return BlockSum(squares, shared);
}
template <class T>
__device__ __forceinline__ float DotOf(const T* gradient, const T* qkv, const T* gamma, float rstd, const Heads& heads,
                                       int64_t row, bool is_key, float* shared) {
  float dot = 0.0f;
  for (int i = threadIdx.x; i < LengthOf(heads, is_key); i += blockDim.x) {
    const int64_t at = PlaceOf(heads, row, is_key, i);
    dot += Widen(gradient[at]) * (Widen(gamma[i]) + heads.gamma_offset) * (Widen(qkv[at]) * rstd);
  }
  return BlockSum(dot, shared);
}

// QkNormOptions' sums [rows, 2] over all ranks, or null.
struct Sums {
  const float* of_all;
  int ranks;
};

template <class T> __global__ void __launch_bounds__(256) ProjectionSquaresKernel(const T* qkv, const Heads heads, float* sums) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  for (int kind = 0; kind < 2; ++kind) {
    const float sum = SquaresOf(qkv, heads, row, kind == 1, shared);
    if (threadIdx.x == 0) sums[2 * row + kind] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    ProjectionDotsKernel(const T* gradient, const T* qkv, const T* query_gamma, const T* key_gamma, const Heads heads,
                         const float* rstds, float* sums) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  for (int kind = 0; kind < 2; ++kind) {
    const float sum =
        DotOf(gradient, qkv, kind == 1 ? key_gamma : query_gamma, rstds[2 * row + kind], heads, row, kind == 1, shared);
    if (threadIdx.x == 0) sums[2 * row + kind] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(256) ProjectionForwardKernel(const T* qkv, const T* query_gamma, const T* key_gamma,
                                                               const Heads heads, const Sums sums, T* y, float* rstds) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  for (int kind = 0; kind < 2; ++kind) {
    const bool is_key = kind == 1;
    const int n = LengthOf(heads, is_key);
    const float squares = sums.of_all != nullptr ? sums.of_all[2 * row + kind] : SquaresOf(qkv, heads, row, is_key, shared);
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(n * sums.ranks) + heads.epsilon);
    const T* gamma = is_key ? key_gamma : query_gamma;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const int64_t at = PlaceOf(heads, row, is_key, i);
      y[at] = Narrow<T>(Widen(qkv[at]) * rstd * (Widen(gamma[i]) + heads.gamma_offset));
    }
    if (threadIdx.x == 0) rstds[2 * row + kind] = rstd;
  }
  for (int i = threadIdx.x; i < heads.groups * heads.size; i += blockDim.x) {  // Values stand after the keys.
    const int64_t at = PlaceOf(heads, row, true, i) + heads.size;
    y[at] = qkv[at];
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    ProjectionBackwardKernel(T* gradient, const T* qkv, const T* query_gamma, const T* key_gamma, const Heads heads,
                             const Sums sums, const float* rstds) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  for (int kind = 0; kind < 2; ++kind) {
    const bool is_key = kind == 1;
    const int n = LengthOf(heads, is_key);
    const float rstd = rstds[2 * row + kind];
    const T* gamma = is_key ? key_gamma : query_gamma;
    const float dot =
        sums.of_all != nullptr ? sums.of_all[2 * row + kind] : DotOf<T>(gradient, qkv, gamma, rstd, heads, row, is_key, shared);
    const float mean_dot = dot / static_cast<float>(n * sums.ranks);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const int64_t at = PlaceOf(heads, row, is_key, i);
      const float t = Widen(gradient[at]) * (Widen(gamma[i]) + heads.gamma_offset);
      gradient[at] = Narrow<T>(rstd * (t - Widen(qkv[at]) * rstd * mean_dot));
    }
  }
}

template <class T> struct ProjectionSumsBody {
  static constexpr int kN = 1, kSums = 1;
  struct Row {
    float dy, normal;
  };
  const T *gradient, *qkv;
  const float* rstds;
  Heads heads;
  bool is_key;

  __device__ Row Load(int64_t row, int64_t column) const {
    const int64_t at = PlaceOf(heads, row, is_key, static_cast<int>(column));
    return {Widen(gradient[at]), Widen(qkv[at]) * rstds[2 * row + (is_key ? 1 : 0)]};
  }
  __device__ void Add(const Row& loaded, int64_t, int64_t, float (&sums)[1][1]) const { sums[0][0] += loaded.dy * loaded.normal; }
};

Heads HeadsOf(const Tensor& qkv, const QkNormOptions& options) {
  const QkvLayout& layout = options.layout;
  const int64_t rows = qkv.size() / layout.width();
  if (rows > INT32_MAX) ThrowEngineError("query-key norm over {} rows", rows);
  if (layout.value_width() != layout.head_size) {
    ThrowEngineError("query-key norm of heads of {} beside values of {}", layout.head_size, layout.value_width());
  }
  return {rows,
          static_cast<int>(layout.groups),
          static_cast<int>(layout.heads_per_group()),
          static_cast<int>(layout.head_size),
          options.norm.epsilon,
          options.norm.gamma_offset,
          0};
}

Sums SumsOf(const QkNormOptions& options) {
  return {options.sums.empty() ? nullptr : PointerOf<const float>(options.sums), static_cast<int>(options.ranks)};
}

void CheckSums(const QkNormOptions& options, int64_t rows, const Tensor& sums) {
  if (options.scope == QkNormScope::kProjection && sums.size() == 2 * rows) return;
  ThrowEngineError("sums {} of {} rows of whole projections", sums.shape.ToString(), rows);
}

void SquaresCuda(const Context& context, const Tensor& qkv, const QkNormOptions& options, const Tensor& sums) {
  CheckStorage(qkv, options.norm.precision);
  const Heads heads = HeadsOf(qkv, options);
  CheckSums(options, heads.rows, sums);
  if (heads.rows == 0) return;
  WithType(qkv.dtype, [&]<class T>(T) {
    ProjectionSquaresKernel<<<static_cast<unsigned>(heads.rows), 256, 0, StreamOf(context)>>>(PointerOf<const T>(qkv), heads,
                                                                                              PointerOf<float>(sums));
  });
  MB_CUDA_LAUNCHED();
}

void DotsCuda(const Context& context, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma,
              const Tensor& key_gamma, const Tensor& rstd, const QkNormOptions& options, const Tensor& sums) {
  CheckStorage(qkv, options.norm.precision);
  const Heads heads = HeadsOf(qkv, options);
  CheckSums(options, heads.rows, sums);
  if (heads.rows == 0) return;
  WithType(qkv.dtype, [&]<class T>(T) {
    ProjectionDotsKernel<<<static_cast<unsigned>(heads.rows), 256, 0, StreamOf(context)>>>(
        PointerOf<const T>(gradient), PointerOf<const T>(qkv), PointerOf<const T>(query_gamma), PointerOf<const T>(key_gamma),
        heads, PointerOf<const float>(rstd), PointerOf<float>(sums));
  });
  MB_CUDA_LAUNCHED();
}

void ForwardCuda(const Context& context, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
                 const QkNormOptions& options, const Tensor& y, const Tensor& rstd) {
  CheckStorage(qkv, options.norm.precision);
  Heads heads = HeadsOf(qkv, options);
  if (heads.rows == 0) return;
  const auto rows = static_cast<unsigned>(heads.rows);
  const cudaStream_t stream = StreamOf(context);
  float* rstds = PointerOf<float>(rstd);
  WithType(qkv.dtype, [&]<class T>(T) {
    const T *in = PointerOf<T>(qkv), *q = PointerOf<T>(query_gamma), *k = PointerOf<T>(key_gamma);
    T* out = PointerOf<T>(y);
    if (options.scope == QkNormScope::kProjection) {
      ProjectionForwardKernel<<<rows, 256, 0, stream>>>(in, q, k, heads, SumsOf(options), out, rstds);
      return;
    }
    WithHeads<T>(&heads, AreAligned16(in, q, k, out),
                 [&]<int kN, int kHold>(std::integral_constant<int, kN>, std::integral_constant<int, kHold>) {
                   ForwardKernel<T, kN, kHold><<<rows, 256, 0, stream>>>(in, q, k, heads, out, rstds);
                 });
  });
  MB_CUDA_LAUNCHED();
}

void BackwardCuda(const Context& context, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma,
                  const Tensor& key_gamma, const Tensor& rstd, const QkNormOptions& options, const Tensor& query_gamma_grad,
                  const Tensor& key_gamma_grad) {
  CheckStorage(qkv, options.norm.precision);
  Heads heads = HeadsOf(qkv, options);
  if (heads.rows == 0) return;
  const int64_t size = heads.size;
  const cudaStream_t stream = StreamOf(context);
  const float* rstds = PointerOf<float>(rstd);
  const ColumnOutputs outputs{{PointerOf<float>(query_gamma_grad), PointerOf<float>(key_gamma_grad)}};
  WithType(qkv.dtype, [&]<class T>(T) {
    T* grad = PointerOf<T>(gradient);
    const T *in = PointerOf<T>(qkv), *q = PointerOf<T>(query_gamma), *k = PointerOf<T>(key_gamma);
    if (options.scope == QkNormScope::kProjection) {
      const int64_t keys = heads.groups * size, queries = keys * heads.per_group;
      SumColumns<T>(context, ProjectionSumsBody<T>{grad, in, rstds, heads, false}, heads.rows, queries,
                    {{outputs.sums[0], nullptr}});
      SumColumns<T>(context, ProjectionSumsBody<T>{grad, in, rstds, heads, true}, heads.rows, keys, {{outputs.sums[1], nullptr}});
      ProjectionBackwardKernel<<<static_cast<unsigned>(heads.rows), 256, 0, stream>>>(grad, in, q, k, heads, SumsOf(options),
                                                                                      rstds);
      MB_CUDA_LAUNCHED();
      return;
    }
    const int64_t blocks = std::min<int64_t>(heads.rows, 132 * 4);
    float* partials = WorkspaceOf<float>(context, blocks * 2 * size);
    WithHeads<T>(&heads, AreAligned16(grad, in, q, k),
                 [&]<int kN, int kHold>(std::integral_constant<int, kN>, std::integral_constant<int, kHold>) {
                   BackwardKernel<T, kN, kHold><<<static_cast<unsigned>(blocks), 256, 2 * size * sizeof(float), stream>>>(
                       grad, in, q, k, heads, rstds, partials);
                 });
    MB_CUDA_LAUNCHED();
    FinishColumns<T, 2>(context, partials, blocks, size, outputs);
  });
}

const bool g_registered = (QkNormForward.cuda = &ForwardCuda, QkNormBackward.cuda = &BackwardCuda,
                           QkNormSquares.cuda = &SquaresCuda, QkNormDots.cuda = &DotsCuda, true);

}  // namespace
}  // namespace mbridge::cuda
