#include "engine/ops/mla_heads.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256;

// Element j of a part of `size` whose first 2 half elements are turned; get(i) gives element i.
template <class T, class Get>
__device__ __forceinline__ float Turned(Get&& get, int j, const float* cosine, const float* sine, float sign, int half,
                                        bool interleaved) {
  if (j >= 2 * half) return get(j);
  const int pair = interleaved ? j / 2 : j % half;
  const bool second = interleaved ? j % 2 == 1 : j >= half;
  const int lo_at = interleaved ? 2 * pair : pair, hi_at = interleaved ? 2 * pair + 1 : pair + half;
  const float lo = get(lo_at), hi = get(hi_at), c = cosine[pair], s = sign * sine[pair];
  return second ? __fadd_rn(Round<T>(__fmul_rn(hi, c)), Round<T>(__fmul_rn(lo, s)))
                : __fadd_rn(Round<T>(__fmul_rn(lo, c)), Round<T>(__fmul_rn(-hi, s)));
}

struct Sizes {
  int heads, plain, turned, value, half, batch, down_width;
  bool interleaved;

  __device__ int key() const { return plain + turned; }
  __device__ int slot() const { return 2 * key() + value; }  // A head's query, key and value.
};

// A block puts one token's heads together.
template <class T>
__global__ void __launch_bounds__(kThreads)
    JoinKernel(const T* query, const T* key_value, const T* down, const float* cosine, const float* sine, const Sizes z, T* qkv) {
  const int64_t token = blockIdx.x, table = token / z.batch * z.half;
  const T *q = query + token * z.heads * z.key(), *kv = key_value + token * z.heads * (z.plain + z.value);
  const T* shared = down + (token + 1) * z.down_width - z.turned;
  T* out = qkv + token * z.heads * z.slot();
  const auto turn = [&](const T* from, int j) {
    return Narrow<T>(
        Turned<T>([from](int i) { return Widen(from[i]); }, j, cosine + table, sine + table, 1.0f, z.half, z.interleaved));
  };
  for (int i = threadIdx.x; i < z.heads * z.slot(); i += kThreads) {
    const int head = i / z.slot(), at = i % z.slot(), of_key = at - z.key(), of_value = of_key - z.key();
    const T *own_query = q + head * z.key(), *own = kv + head * (z.plain + z.value);
    if (of_value >= 0) {
      out[i] = own[z.plain + of_value];
    } else if (of_key >= 0) {
      out[i] = of_key < z.plain ? own[of_key] : turn(shared, of_key - z.plain);
    } else {
      out[i] = at < z.plain ? own_query[at] : turn(own_query + z.plain, at - z.plain);
    }
  }
}

// And takes its gradients apart. Dynamic shared memory: z.turned floats.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SplitKernel(const T* d_qkv, const float* cosine, const float* sine, const Sizes z, T* d_query, T* d_key_value, T* d_down) {
  extern __shared__ float sums[];
  const int64_t token = blockIdx.x, table = token / z.batch * z.half;
  T *q = d_query + token * z.heads * z.key(), *kv = d_key_value + token * z.heads * (z.plain + z.value);
  T* shared = d_down + (token + 1) * z.down_width - z.turned;
  const T* in = d_qkv + token * z.heads * z.slot();
  for (int j = threadIdx.x; j < z.turned; j += kThreads) {
    float sum = 0.0f;
    for (int head = 0; head < z.heads; ++head) sum += Widen(in[head * z.slot() + z.key() + z.plain + j]);
    sums[j] = Round<T>(sum);
  }
  for (int i = threadIdx.x; i < z.heads * z.slot(); i += kThreads) {
    const int head = i / z.slot(), at = i % z.slot(), of_key = at - z.key(), of_value = of_key - z.key();
    T *own_query = q + head * z.key(), *own = kv + head * (z.plain + z.value);
    if (of_value >= 0) {
      own[z.plain + of_value] = in[i];
    } else if (of_key >= 0) {
      if (of_key < z.plain) own[of_key] = in[i];
    } else if (at < z.plain) {
      own_query[at] = in[i];
    } else {
      const T* from = in + head * z.slot() + z.plain;
      own_query[at] = Narrow<T>(Turned<T>([from](int j) { return Widen(from[j]); }, at - z.plain, cosine + table, sine + table,
                                          -1.0f, z.half, z.interleaved));
    }
  }
  __syncthreads();
  for (int j = threadIdx.x; j < z.turned; j += kThreads) {
    shared[j] =
        Narrow<T>(Turned<T>([](int i) { return sums[i]; }, j, cosine + table, sine + table, -1.0f, z.half, z.interleaved));
  }
}

Sizes SizesOf(const Tensor& query, const Tensor& key_value, const Tensor& down, const Tensor& qkv, const Tensor& cosine,
              const MlaLayout& o, RotaryPairs pairs, DType precision) {
  CheckStorage(qkv, precision);
  const bool same_type = query.dtype == precision && key_value.dtype == precision && down.dtype == precision;
  if (!same_type || LastDimension(query) != o.query_width() || LastDimension(key_value) != o.key_value_width() ||
      LastDimension(down) <= o.turned_size || LastDimension(qkv) != o.qkv().width() || cosine.shape[0] != qkv.shape[0] ||
      2 * cosine.shape[1] > o.turned_size) {
    ThrowEngineError("latent attention of {} heads: {}, {}, {} and {} with tables {}", o.heads, query.shape.ToString(),
                     key_value.shape.ToString(), down.shape.ToString(), qkv.shape.ToString(), cosine.shape.ToString());
  }
  const auto narrow = [](int64_t x) { return static_cast<int>(x); };
  return {narrow(o.heads),         narrow(o.plain_size), narrow(o.turned_size),       narrow(o.value_size),
          narrow(cosine.shape[1]), narrow(qkv.shape[1]), narrow(LastDimension(down)), pairs == RotaryPairs::kInterleaved};
}

void JoinCuda(const Context& context, const Tensor& query, const Tensor& key_value, const Tensor& down, const Tensor& cosine,
              const Tensor& sine, const MlaLayout& o, RotaryPairs pairs, DType precision, const Tensor& qkv) {
  const Sizes sizes = SizesOf(query, key_value, down, qkv, cosine, o, pairs, precision);
  const int64_t tokens = qkv.shape[0] * qkv.shape[1];
  if (tokens == 0) return;
  WithType(precision, [&]<class T>(T) {
    JoinKernel<<<static_cast<unsigned>(tokens), kThreads, 0, StreamOf(context)>>>(
        PointerOf<const T>(query), PointerOf<const T>(key_value), PointerOf<const T>(down), PointerOf<const float>(cosine),
        PointerOf<const float>(sine), sizes, PointerOf<T>(qkv));
  });
  MB_CUDA_LAUNCHED();
}

void SplitCuda(const Context& context, const Tensor& d_qkv, const Tensor& cosine, const Tensor& sine, const MlaLayout& o,
               RotaryPairs pairs, DType precision, const Tensor& d_query, const Tensor& d_key_value, const Tensor& d_down) {
  const Sizes sizes = SizesOf(d_query, d_key_value, d_down, d_qkv, cosine, o, pairs, precision);
  const int64_t tokens = d_qkv.shape[0] * d_qkv.shape[1];
  if (tokens == 0) return;
  WithType(precision, [&]<class T>(T) {
    SplitKernel<<<static_cast<unsigned>(tokens), kThreads, o.turned_size * sizeof(float), StreamOf(context)>>>(
        PointerOf<const T>(d_qkv), PointerOf<const float>(cosine), PointerOf<const float>(sine), sizes, PointerOf<T>(d_query),
        PointerOf<T>(d_key_value), PointerOf<T>(d_down));
  });
  MB_CUDA_LAUNCHED();
}

void CopyColumnsCuda(const Context& context, const Tensor& from, int64_t from_begin, const Tensor& to, int64_t to_begin,
                     int64_t count, DType precision) {
  CheckStorage(from, precision);
  const int64_t from_width = LastDimension(from), to_width = LastDimension(to), rows = from.size() / from_width;
  if (to.size() / to_width != rows || from_begin + count > from_width || to_begin + count > to_width || to.dtype != from.dtype)
    ThrowEngineError("{} columns of {} into {}", count, from.shape.ToString(), to.shape.ToString());
  const auto size = static_cast<int64_t>(SizeOf(from.dtype));
  MB_CUDA(cudaMemcpy2DAsync(static_cast<char*>(to.data) + to_begin * size, to_width * size,
                            static_cast<const char*>(from.data) + from_begin * size, from_width * size, count * size, rows,
                            cudaMemcpyDeviceToDevice, StreamOf(context)));
}

const bool g_registered =
    (MlaJoinHeads.cuda = &JoinCuda, MlaSplitHeads.cuda = &SplitCuda, CopyColumns.cuda = &CopyColumnsCuda, true);

}  // namespace
}  // namespace mbridge::cuda
