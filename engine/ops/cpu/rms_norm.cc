#include "engine/ops/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge {
namespace {

// A normalised vector: `count` slices of d elements, slice i at column_of(i) of its row; gamma is contiguous.
template <class P, class ColumnOf>
float SquaresOfSlices(const typename P::Storage* x, int64_t count, int64_t d, ColumnOf column_of) {
  float squares = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const auto* in = x + column_of(i);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < d; ++j) sum += P::Load(in[j]) * P::Load(in[j]);
    squares += sum;
  }
  return squares;
}

// The vector is `ranks` times as long as the slices; `squares` is of all of it.
template <class P, class ColumnOf>
float ForwardSlices(const typename P::Storage* x, const typename P::Storage* gamma, int64_t count, int64_t d, ColumnOf column_of,
                    float squares, int64_t ranks, const NormOptions& o, typename P::Storage* y) {
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(count * d * ranks) + o.epsilon), offset = o.gamma_offset;
  for (int64_t i = 0; i < count; ++i) {
    const auto *in = x + column_of(i), *g = gamma + i * d;
    auto* out = y + column_of(i);
#pragma omp simd
    for (int64_t j = 0; j < d; ++j) out[j] = P::Store(P::Load(in[j]) * r * (P::Load(g[j]) + offset));
  }
  return r;
}

template <class P, class ColumnOf>
float DotOfSlices(const typename P::Storage* dy, const typename P::Storage* x, const typename P::Storage* gamma, float offset,
                  float r, int64_t count, int64_t d, ColumnOf column_of) {
  float dot = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const auto *grad = dy + column_of(i), *in = x + column_of(i), *g = gamma + i * d;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < d; ++j) sum += P::Load(grad[j]) * (P::Load(g[j]) + offset) * (P::Load(in[j]) * r);
    dot += sum;
  }
  return dot;
}

// residual may be null; dx may be dy or residual.
template <class P, class ColumnOf>
void BackwardSlices(const typename P::Storage* dy, const typename P::Storage* x, const typename P::Storage* gamma, float offset,
                    float r, const typename P::Storage* residual, int64_t count, int64_t d, ColumnOf column_of, float mean_dot,
                    typename P::Storage* dx) {
  for (int64_t i = 0; i < count; ++i) {
    const auto *grad = dy + column_of(i), *in = x + column_of(i), *g = gamma + i * d;
    auto* out = dx + column_of(i);
    const auto gradient = [&](int64_t j) {
      return P::Round(r * (P::Load(grad[j]) * (P::Load(g[j]) + offset) - P::Load(in[j]) * r * mean_dot));
    };
    if (residual == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = P::Store(gradient(j));
    } else {
      const auto* joined = residual + column_of(i);
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = P::Store(P::Load(joined[j]) + gradient(j));
    }
  }
}

int64_t AtRowBegin(int64_t) { return 0; }

// gamma_grad += round(sum of dy n over rows). row_at(i) is the offset of row i in dy and x, rstd_at(i) its factor. A thread owns
// columns, so the order of summation is that of the rows.
template <class P, class RowAt, class RstdAt>
void AddGammaGradient(const typename P::Storage* dy, const typename P::Storage* x, int64_t rows, int64_t h, RowAt row_at,
                      RstdAt rstd_at, float* gamma_grad) {
  constexpr int64_t kBlock = 32;
  const int64_t blocks = (h + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kBlock, width = std::min(kBlock, h - begin);
    float sum[kBlock] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const auto *g = dy + row_at(i) + begin, *in = x + row_at(i) + begin;
      const float r = rstd_at(i);
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) sum[j] += P::Load(g[j]) * (P::Load(in[j]) * r);
    }
    for (int64_t j = 0; j < width; ++j) gamma_grad[begin + j] += P::Round(sum[j]);
  }
}

int64_t LastDimension(const Tensor& x) { return x.shape[x.shape.rank() - 1]; }

void ForwardCpu(const Context& context, const Tensor& x, const Tensor& gamma, const NormOptions& options, const Tensor& y,
                const Tensor& rstd) {
  const int64_t h = LastDimension(x), rows = x.size() / h;
  cpu::WithPrecision(x.dtype, options.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *in = x.as<T>(), *scale = gamma.as<T>();
    T* out = y.as<T>();
    float* rstds = rstd.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const float squares = SquaresOfSlices<P>(in + i * h, 1, h, AtRowBegin);
      rstds[i] = ForwardSlices<P>(in + i * h, scale, 1, h, AtRowBegin, squares, 1, options, out + i * h);
    }
  });
  if (!options.amax.empty()) Fp8Amax.cpu(context, y, options.amax);
}

void AddForwardCpu(const Context& context, const Tensor& x, const Tensor& residual, const Tensor& gamma,
                   const NormOptions& options, const Tensor& hidden, const Tensor& y, const Tensor& rstd) {
  cpu::WithPrecision(x.dtype, options.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *added = x.as<T>(), *before = residual.as<T>();
    T* sum = hidden.as<T>();
    const int64_t count = x.size();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; ++i) sum[i] = P::Store(P::Load(before[i]) + P::Load(added[i]));
  });
  ForwardCpu(context, hidden, gamma, options, y, rstd);
}

void BackwardCpu(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& rstd,
                 const Tensor& d_residual, const NormOptions& options, const Tensor& dx, const Tensor& gamma_grad) {
  const int64_t h = LastDimension(x), rows = x.size() / h;
  cpu::WithPrecision(x.dtype, options.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *g = dy.as<T>(), *in = x.as<T>(), *scale = gamma.as<T>();
    const float* rstds = rstd.as<float>();
    AddGammaGradient<P>(
        g, in, rows, h, [h](int64_t i) { return i * h; }, [rstds](int64_t i) { return rstds[i]; },
        gamma_grad.as<float>());  // Before dx overwrites dy.
    const T* residual = d_residual.empty() ? nullptr : d_residual.as<T>();
    T* out = dx.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const float dot = DotOfSlices<P>(g + i * h, in + i * h, scale, options.gamma_offset, rstds[i], 1, h, AtRowBegin);
      BackwardSlices<P>(g + i * h, in + i * h, scale, options.gamma_offset, rstds[i],
                        residual == nullptr ? nullptr : residual + i * h, 1, h, AtRowBegin, dot / static_cast<float>(h),
                        out + i * h);
    }
  });
  if (!options.amax.empty()) Fp8Amax.cpu(context, dx, options.amax);
}

// The vectors of a token that are normalised, queries first.
struct Spans {
  const QkNormOptions& options;

  int64_t count() const { return options.scope == QkNormScope::kProjection ? 2 : options.layout.heads + options.layout.groups; }
  // apply(place in rstd, number of slices, columns of the slices, whether they are keys).
  template <class Apply> void ForEach(Apply&& apply) const {
    const QkvLayout& l = options.layout;
    const auto query = [&l](int64_t head) { return l.query_column(head); };
    const auto key = [&l](int64_t group) { return l.key_column(group); };
    if (options.scope == QkNormScope::kProjection) {
      apply(0, l.heads, query, false);
      apply(1, l.groups, key, true);
      return;
    }
    for (int64_t head = 0; head < l.heads; ++head)
      apply(
          head, 1, [&, head](int64_t) { return query(head); }, false);
    for (int64_t group = 0; group < l.groups; ++group)
      apply(
          l.heads + group, 1, [&, group](int64_t) { return key(group); }, true);
  }
};

void QkForwardCpu(const Context&, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
                  const QkNormOptions& options, const Tensor& y, const Tensor& rstd) {
  const QkvLayout& layout = options.layout;
  const int64_t width = layout.width(), rows = qkv.size() / width, d = layout.head_size;
  const Spans spans{options};
  cpu::WithPrecision(qkv.dtype, options.norm.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *in = qkv.as<T>(), *q = query_gamma.as<T>(), *k = key_gamma.as<T>();
    T* out = y.as<T>();
    float* rstds = rstd.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = in + i * width;
      T* to = out + i * width;
      spans.ForEach([&](int64_t place, int64_t count, auto column_of, bool is_key) {
        const float squares =
            options.sums.empty() ? SquaresOfSlices<P>(row, count, d, column_of) : options.sums.as<float>()[2 * i + place];
        rstds[i * spans.count() + place] =
            ForwardSlices<P>(row, is_key ? k : q, count, d, column_of, squares, options.ranks, options.norm, to);
      });
      for (int64_t group = 0; group < layout.groups; ++group)
        std::copy_n(row + layout.value_column(group), layout.value_width(), to + layout.value_column(group));
    }
  });
}

// The gammas' gradients: heads that share a gamma are rows of one sum.
template <class P>
void AddQkGammaGradients(const typename P::Storage* grad, const typename P::Storage* in, const float* rstds, int64_t rows,
                         const QkNormOptions& options, float* query_grad, float* key_grad) {
  const QkvLayout& layout = options.layout;
  const int64_t width = layout.width(), d = layout.head_size, heads = layout.heads, groups = layout.groups;
  const int64_t kinds = Spans{options}.count();
  if (options.scope == QkNormScope::kProjection) {
    const auto add = [&](int64_t column, int64_t place, float* to) {
      AddGammaGradient<P>(
          grad, in, rows, d, [&](int64_t i) { return i * width + column; }, [&](int64_t i) { return rstds[i * kinds + place]; },
          to);
    };
    for (int64_t head = 0; head < heads; ++head) add(layout.query_column(head), 0, query_grad + head * d);
    for (int64_t group = 0; group < groups; ++group) add(layout.key_column(group), 1, key_grad + group * d);
    return;
  }
  AddGammaGradient<P>(
      grad, in, rows * heads, d, [&](int64_t i) { return i / heads * width + layout.query_column(i % heads); },
      [&](int64_t i) { return rstds[i / heads * kinds + i % heads]; }, query_grad);
  AddGammaGradient<P>(
      grad, in, rows * groups, d, [&](int64_t i) { return i / groups * width + layout.key_column(i % groups); },
      [&](int64_t i) { return rstds[i / groups * kinds + heads + i % groups]; }, key_grad);
}

void QkBackwardCpu(const Context&, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
                   const Tensor& rstd, const QkNormOptions& options, const Tensor& query_gamma_grad,
                   const Tensor& key_gamma_grad) {
  const int64_t width = options.layout.width(), rows = qkv.size() / width, d = options.layout.head_size;
  const Spans spans{options};
  cpu::WithPrecision(qkv.dtype, options.norm.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    T* grad = gradient.as<T>();
    const T *in = qkv.as<T>(), *q = query_gamma.as<T>(), *k = key_gamma.as<T>();
    const float* rstds = rstd.as<float>();
    AddQkGammaGradients<P>(grad, in, rstds, rows, options, query_gamma_grad.as<float>(), key_gamma_grad.as<float>());
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      T* place_in_grad = grad + i * width;
      spans.ForEach([&](int64_t place, int64_t count, auto column_of, bool is_key) {
        const T* gamma = is_key ? k : q;
        const float r = rstds[i * spans.count() + place], offset = options.norm.gamma_offset;
        const float dot = options.sums.empty()
                              ? DotOfSlices<P>(place_in_grad, in + i * width, gamma, offset, r, count, d, column_of)
                              : options.sums.as<float>()[2 * i + place];
        BackwardSlices<P>(place_in_grad, in + i * width, gamma, offset, r, nullptr, count, d, column_of,
                          dot / static_cast<float>(count * d * options.ranks), place_in_grad);
      });
    }
  });
}

void CheckSums(const QkNormOptions& options, int64_t rows, const Tensor& sums) {
  if (options.scope == QkNormScope::kProjection && sums.size() == 2 * rows) return;
  ThrowEngineError("sums {} of {} rows of whole projections", sums.shape.ToString(), rows);
}

void QkSquaresCpu(const Context&, const Tensor& qkv, const QkNormOptions& options, const Tensor& sums) {
  const int64_t width = options.layout.width(), rows = qkv.size() / width;
  CheckSums(options, rows, sums);
  const Spans spans{options};
  cpu::WithPrecision(qkv.dtype, options.norm.precision, [&]<class P>(P) {
    const auto* in = qkv.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      spans.ForEach([&](int64_t place, int64_t count, auto column_of, bool) {
        sums.as<float>()[2 * i + place] = SquaresOfSlices<P>(in + i * width, count, options.layout.head_size, column_of);
      });
    }
  });
}

void QkDotsCpu(const Context&, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
               const Tensor& rstd, const QkNormOptions& options, const Tensor& sums) {
  const int64_t width = options.layout.width(), rows = qkv.size() / width;
  CheckSums(options, rows, sums);
  const Spans spans{options};
  cpu::WithPrecision(qkv.dtype, options.norm.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *grad = gradient.as<T>(), *in = qkv.as<T>(), *q = query_gamma.as<T>(), *k = key_gamma.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      spans.ForEach([&](int64_t place, int64_t count, auto column_of, bool is_key) {
        sums.as<float>()[2 * i + place] =
            DotOfSlices<P>(grad + i * width, in + i * width, is_key ? k : q, options.norm.gamma_offset,
                           rstd.as<float>()[2 * i + place], count, options.layout.head_size, column_of);
      });
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const NormOptions&, const Tensor&, const Tensor&)> RmsNormForward{
    &ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const NormOptions&, const Tensor&, const Tensor&,
        const Tensor&)>
    AddRmsNormForward{&AddForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const NormOptions&,
        const Tensor&, const Tensor&)>
    RmsNormBackward{&BackwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const QkNormOptions&, const Tensor&, const Tensor&)>
    QkNormForward{&QkForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const QkNormOptions&,
        const Tensor&, const Tensor&)>
    QkNormBackward{&QkBackwardCpu};
Op<void(const Context&, const Tensor&, const QkNormOptions&, const Tensor&)> QkNormSquares{&QkSquaresCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const QkNormOptions&,
        const Tensor&)>
    QkNormDots{&QkDotsCpu};

}  // namespace mbridge
