#include "engine/ops/mla_heads.h"

#include <vector>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

int64_t WidthOf(const Tensor& x) { return x.shape[x.shape.rank() - 1]; }

void CheckWidths(const Tensor& query, const Tensor& key_value, const Tensor& down, const Tensor& qkv, const Tensor& cosine,
                 const MlaLayout& o) {
  if (WidthOf(query) == o.query_width() && WidthOf(key_value) == o.key_value_width() && WidthOf(down) > o.turned_size &&
      WidthOf(qkv) == o.qkv().width() && cosine.shape[0] == qkv.shape[0] && 2 * cosine.shape[1] <= o.turned_size) {
    return;
  }
  ThrowEngineError("latent attention of {} heads: {}, {}, {} and {} with tables {}", o.heads, query.shape.ToString(),
                   key_value.shape.ToString(), down.shape.ToString(), qkv.shape.ToString(), cosine.shape.ToString());
}

// to = from with its first 2 half elements turned; `sign` -1 turns back. May be in place.
template <class P, class From, class To>
void Turn(const From* from, const float* cosine, const float* sine, float sign, int64_t half, int64_t size, RotaryPairs pairs,
          To* to) {
  const int64_t step = pairs == RotaryPairs::kInterleaved ? 2 : 1, apart = pairs == RotaryPairs::kInterleaved ? 1 : half;
  for (int64_t j = 0; j < half; ++j) {
    const float lo = P::Load(from[j * step]), hi = P::Load(from[j * step + apart]), c = cosine[j], s = sign * sine[j];
    to[j * step] = P::Store(P::Round(lo * c) + P::Round(-hi * s));
    to[j * step + apart] = P::Store(P::Round(hi * c) + P::Round(lo * s));
  }
  for (int64_t j = 2 * half; j < size; ++j) to[j] = P::Store(P::Load(from[j]));
}

template <class P> void Copy(const typename P::Storage* from, int64_t count, typename P::Storage* to) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) to[j] = P::Store(P::Load(from[j]));
}

void JoinCpu(const Context&, const Tensor& query, const Tensor& key_value, const Tensor& down, const Tensor& cosine,
             const Tensor& sine, const MlaLayout& o, RotaryPairs pairs, DType precision, const Tensor& qkv) {
  CheckWidths(query, key_value, down, qkv, cosine, o);
  const int64_t rows = qkv.shape[0] * qkv.shape[1], b = qkv.shape[1], half = cosine.shape[1], down_width = WidthOf(down);
  const QkvLayout layout = o.qkv();
  cpu::WithPrecision(qkv.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T *q = query.as<T>() + row * o.query_width(), *kv = key_value.as<T>() + row * o.key_value_width();
      const T* shared = down.as<T>() + (row + 1) * down_width - o.turned_size;
      const float *c = cosine.as<float>() + row / b * half, *s = sine.as<float>() + row / b * half;
      T* out = qkv.as<T>() + row * layout.width();
      const T* first_key = out + layout.key_column(0) + o.plain_size;
      for (int64_t head = 0; head < o.heads; ++head) {
        const T* of_query = q + head * (o.plain_size + o.turned_size);
        const T* of_key = kv + head * (o.plain_size + o.value_size);
        T *to_query = out + layout.query_column(head), *to_key = out + layout.key_column(head);
        Copy<P>(of_query, o.plain_size, to_query);
        Turn<P>(of_query + o.plain_size, c, s, 1.0f, half, o.turned_size, pairs, to_query + o.plain_size);
        Copy<P>(of_key, o.plain_size, to_key);
        if (head == 0) {
          Turn<P>(shared, c, s, 1.0f, half, o.turned_size, pairs, to_key + o.plain_size);
        } else {
          Copy<P>(first_key, o.turned_size, to_key + o.plain_size);
        }
        Copy<P>(of_key + o.plain_size, o.value_size, out + layout.value_column(head));
      }
    }
  });
}

void SplitCpu(const Context&, const Tensor& d_qkv, const Tensor& cosine, const Tensor& sine, const MlaLayout& o,
              RotaryPairs pairs, DType precision, const Tensor& d_query, const Tensor& d_key_value, const Tensor& d_down) {
  CheckWidths(d_query, d_key_value, d_down, d_qkv, cosine, o);
  const int64_t rows = d_qkv.shape[0] * d_qkv.shape[1], b = d_qkv.shape[1], half = cosine.shape[1], down_width = WidthOf(d_down);
  const QkvLayout layout = o.qkv();
  cpu::WithPrecision(d_qkv.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
#pragma omp parallel
    {
      std::vector<float> sums(o.turned_size);
      std::vector<T> rounded(o.turned_size);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        T *q = d_query.as<T>() + row * o.query_width(), *kv = d_key_value.as<T>() + row * o.key_value_width();
        const float *c = cosine.as<float>() + row / b * half, *s = sine.as<float>() + row / b * half;
        const T* in = d_qkv.as<T>() + row * layout.width();
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t head = 0; head < o.heads; ++head) {
          T* to_query = q + head * (o.plain_size + o.turned_size);
          T* to_key = kv + head * (o.plain_size + o.value_size);
          const T *of_query = in + layout.query_column(head), *of_key = in + layout.key_column(head);
          Copy<P>(of_query, o.plain_size, to_query);
          Turn<P>(of_query + o.plain_size, c, s, -1.0f, half, o.turned_size, pairs, to_query + o.plain_size);
          Copy<P>(of_key, o.plain_size, to_key);
          for (int64_t j = 0; j < o.turned_size; ++j) sums[j] += P::Load(of_key[o.plain_size + j]);
          Copy<P>(in + layout.value_column(head), o.value_size, to_key + o.plain_size);
        }
        for (int64_t j = 0; j < o.turned_size; ++j) rounded[j] = P::Store(sums[j]);
        T* shared = d_down.as<T>() + (row + 1) * down_width - o.turned_size;
        Turn<P>(rounded.data(), c, s, -1.0f, half, o.turned_size, pairs, shared);
      }
    }
  });
}

void CopyColumnsCpu(const Context&, const Tensor& from, int64_t from_begin, const Tensor& to, int64_t to_begin, int64_t count,
                    DType precision) {
  const int64_t from_width = WidthOf(from), to_width = WidthOf(to), rows = from.size() / from_width;
  if (to.size() / to_width != rows || from_begin + count > from_width || to_begin + count > to_width) {
    ThrowEngineError("{} columns of {} into {}", count, from.shape.ToString(), to.shape.ToString());
  }
  cpu::WithPrecision(from.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      Copy<P>(from.as<T>() + row * from_width + from_begin, count, to.as<T>() + row * to_width + to_begin);
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MlaLayout&, RotaryPairs,
        DType, const Tensor&)>
    MlaJoinHeads{&JoinCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const MlaLayout&, RotaryPairs, DType, const Tensor&,
        const Tensor&, const Tensor&)>
    MlaSplitHeads{&SplitCpu};
Op<void(const Context&, const Tensor&, int64_t, const Tensor&, int64_t, int64_t, DType)> CopyColumns{&CopyColumnsCpu};

}  // namespace mbridge
