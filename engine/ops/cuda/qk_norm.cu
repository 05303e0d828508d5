#include "engine/ops/cuda/column_sums.h"
#include "engine/ops/rms_norm.h"

namespace mbridge::cuda {
namespace {

// `lanes` neighbouring threads (a power of two) share a head; a thread holds kHold vectors of kN of its elements. Positions in a
// row: for each group its queries, its key, its value.
struct Heads {
  int64_t rows;
  int groups, per_group, size, lanes;
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
    ForwardKernel(const T* qkv, const T* query_gamma, const T* key_gamma, const Heads heads, float epsilon, T* y, float* rstds) {
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
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(heads.size) + epsilon);
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
      for (int i = 0; i < kN; ++i) values[i] = values[i] * rstd * gamma[i];
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
          dot += d[i] * gamma[i] * normal;
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
        for (int i = 0; i < kN; ++i) d[i] = rstd * (d[i] * gamma[i] - values[i] * rstd * mean_dot);
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

Heads HeadsOf(const Tensor& qkv, const QkvLayout& layout) {
  const int64_t rows = qkv.size() / layout.width();
  if (rows > INT32_MAX) ThrowEngineError("query-key norm over {} rows", rows);
  return {rows, static_cast<int>(layout.groups), static_cast<int>(layout.heads_per_group()), static_cast<int>(layout.head_size),
          0};
}

void ForwardCuda(const Context& context, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
                 const QkvLayout& layout, float epsilon, DType precision, const Tensor& y, const Tensor& rstd) {
  CheckStorage(qkv, precision);
  Heads heads = HeadsOf(qkv, layout);
  if (heads.rows == 0) return;
  WithType(qkv.dtype, [&]<class T>(T) {
    const T *in = PointerOf<T>(qkv), *q = PointerOf<T>(query_gamma), *k = PointerOf<T>(key_gamma);
    T* out = PointerOf<T>(y);
    WithHeads<T>(&heads, AreAligned16(in, q, k, out),
                 [&]<int kN, int kHold>(std::integral_constant<int, kN>, std::integral_constant<int, kHold>) {
                   ForwardKernel<T, kN, kHold><<<static_cast<unsigned>(heads.rows), 256, 0, StreamOf(context)>>>(
                       in, q, k, heads, epsilon, out, PointerOf<float>(rstd));
                 });
  });
  MB_CUDA_LAUNCHED();
}

void BackwardCuda(const Context& context, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma,
                  const Tensor& key_gamma, const Tensor& rstd, const QkvLayout& layout, DType precision,
                  const Tensor& query_gamma_grad, const Tensor& key_gamma_grad) {
  CheckStorage(qkv, precision);
  Heads heads = HeadsOf(qkv, layout);
  if (heads.rows == 0) return;
  const int64_t blocks = std::min<int64_t>(heads.rows, 132 * 4), size = layout.head_size;
  float* partials = WorkspaceOf<float>(context, blocks * 2 * size);
  WithType(qkv.dtype, [&]<class T>(T) {
    T* grad = PointerOf<T>(gradient);
    const T *in = PointerOf<T>(qkv), *q = PointerOf<T>(query_gamma), *k = PointerOf<T>(key_gamma);
    WithHeads<T>(&heads, AreAligned16(grad, in, q, k),
                 [&]<int kN, int kHold>(std::integral_constant<int, kN>, std::integral_constant<int, kHold>) {
                   BackwardKernel<T, kN, kHold>
                       <<<static_cast<unsigned>(blocks), 256, 2 * size * sizeof(float), StreamOf(context)>>>(
                           grad, in, q, k, heads, PointerOf<float>(rstd), partials);
                 });
    MB_CUDA_LAUNCHED();
    FinishColumns<T, 2>(context, partials, blocks, size,
                        {{PointerOf<float>(query_gamma_grad), PointerOf<float>(key_gamma_grad)}});
  });
}

const bool g_registered = (QkNormForward.cuda = &ForwardCuda, QkNormBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
