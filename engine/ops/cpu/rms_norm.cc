#include "engine/ops/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

template <class P>
float ForwardRow(const typename P::Storage* x, const typename P::Storage* gamma, int64_t h, float epsilon,
                 typename P::Storage* y) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < h; ++j) squares += P::Load(x[j]) * P::Load(x[j]);
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(h) + epsilon);
#pragma omp simd
  for (int64_t j = 0; j < h; ++j) y[j] = P::Store(P::Load(x[j]) * r * P::Load(gamma[j]));
  return r;
}

// residual may be null.
template <class P>
void BackwardRow(const typename P::Storage* dy, const typename P::Storage* x, const typename P::Storage* gamma, float r,
                 const typename P::Storage* residual, int64_t h, typename P::Storage* dx) {
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t j = 0; j < h; ++j) dot += P::Load(dy[j]) * P::Load(gamma[j]) * (P::Load(x[j]) * r);
  const float mean_dot = dot / static_cast<float>(h);
  const auto gradient = [&](int64_t j) {
    return P::Round(r * (P::Load(dy[j]) * P::Load(gamma[j]) - P::Load(x[j]) * r * mean_dot));
  };
  if (residual == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) dx[j] = P::Store(gradient(j));
  } else {
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) dx[j] = P::Store(P::Load(residual[j]) + gradient(j));
  }
}

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

void ForwardCpu(const Context&, const Tensor& x, const Tensor& gamma, float epsilon, DType precision, const Tensor& y,
                const Tensor& rstd) {
  const int64_t h = LastDimension(x), rows = x.size() / h;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *in = x.as<T>(), *scale = gamma.as<T>();
    T* out = y.as<T>();
    float* rstds = rstd.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) rstds[i] = ForwardRow<P>(in + i * h, scale, h, epsilon, out + i * h);
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& rstd,
                 const Tensor& d_residual, DType precision, const Tensor& dx, const Tensor& gamma_grad) {
  const int64_t h = LastDimension(x), rows = x.size() / h;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
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
      BackwardRow<P>(g + i * h, in + i * h, scale, rstds[i], residual == nullptr ? nullptr : residual + i * h, h, out + i * h);
    }
  });
}

void QkForwardCpu(const Context&, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma, const QkvLayout& layout,
                  float epsilon, DType precision, const Tensor& y, const Tensor& rstd) {
  const int64_t width = layout.width(), rows = qkv.size() / width, d = layout.head_size, kinds = layout.heads + layout.groups;
  cpu::WithPrecision(qkv.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *in = qkv.as<T>(), *q = query_gamma.as<T>(), *k = key_gamma.as<T>();
    T* out = y.as<T>();
    float* rstds = rstd.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = in + i * width;
      T* to = out + i * width;
      for (int64_t head = 0; head < layout.heads; ++head) {
        const int64_t at = layout.query_column(head);
        rstds[i * kinds + head] = ForwardRow<P>(row + at, q, d, epsilon, to + at);
      }
      for (int64_t group = 0; group < layout.groups; ++group) {
        const int64_t at = layout.key_column(group), value = layout.value_column(group);
        rstds[i * kinds + layout.heads + group] = ForwardRow<P>(row + at, k, d, epsilon, to + at);
        std::copy_n(row + value, d, to + value);
      }
    }
  });
}

void QkBackwardCpu(const Context&, const Tensor& gradient, const Tensor& qkv, const Tensor& query_gamma, const Tensor& key_gamma,
                   const Tensor& rstd, const QkvLayout& layout, DType precision, const Tensor& query_gamma_grad,
                   const Tensor& key_gamma_grad) {
  const int64_t width = layout.width(), rows = qkv.size() / width, d = layout.head_size, kinds = layout.heads + layout.groups;
  cpu::WithPrecision(qkv.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    T* grad = gradient.as<T>();
    const T *in = qkv.as<T>(), *q = query_gamma.as<T>(), *k = key_gamma.as<T>();
    const float* rstds = rstd.as<float>();
    const int64_t heads = layout.heads, groups = layout.groups;
    AddGammaGradient<P>(
        grad, in, rows * heads, d, [&](int64_t i) { return i / heads * width + layout.query_column(i % heads); },
        [&](int64_t i) { return rstds[i / heads * kinds + i % heads]; }, query_gamma_grad.as<float>());
    AddGammaGradient<P>(
        grad, in, rows * groups, d, [&](int64_t i) { return i / groups * width + layout.key_column(i % groups); },
        [&](int64_t i) { return rstds[i / groups * kinds + heads + i % groups]; }, key_gamma_grad.as<float>());
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const auto backward = [&](int64_t at, const T* gamma, float r) {
        T* place = grad + i * width + at;
        BackwardRow<P>(place, in + i * width + at, gamma, r, nullptr, d, place);
      };
      for (int64_t head = 0; head < heads; ++head) backward(layout.query_column(head), q, rstds[i * kinds + head]);
      for (int64_t group = 0; group < groups; ++group) backward(layout.key_column(group), k, rstds[i * kinds + heads + group]);
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, float, DType, const Tensor&, const Tensor&)> RmsNormForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, DType, const Tensor&,
        const Tensor&)>
    RmsNormBackward{&BackwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const QkvLayout&, float, DType, const Tensor&,
        const Tensor&)>
    QkNormForward{&QkForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const QkvLayout&, DType,
        const Tensor&, const Tensor&)>
    QkNormBackward{&QkBackwardCpu};

}  // namespace mbridge
