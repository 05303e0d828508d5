#include "engine/ops/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge {
namespace {

int64_t LastDimension(const Tensor& x) { return x.shape[x.shape.rank() - 1]; }

template <class P>
void ForwardRow(const typename P::Storage* x, const typename P::Storage* gamma, const typename P::Storage* beta, int64_t h,
                const NormOptions& o, typename P::Storage* y, float* mean, float* rstd) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < h; ++j) sum += P::Load(x[j]);
  const float m = sum / static_cast<float>(h);
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < h; ++j) {
    const float d = P::Load(x[j]) - m;
    squares += d * d;
  }
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(h) + o.epsilon);
  const float offset = o.gamma_offset;
#pragma omp simd
  for (int64_t j = 0; j < h; ++j) y[j] = P::Store((P::Load(x[j]) - m) * r * (P::Load(gamma[j]) + offset) + P::Load(beta[j]));
  *mean = m;
  *rstd = r;
}

void ForwardCpu(const Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, const NormOptions& options,
                const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const int64_t h = LastDimension(x), rows = x.size() / h;
  cpu::WithPrecision(x.dtype, options.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *in = x.as<T>(), *g = gamma.as<T>(), *b = beta.as<T>();
    T* out = y.as<T>();
    float *means = mean.as<float>(), *rstds = rstd.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) ForwardRow<P>(in + i * h, g, b, h, options, out + i * h, means + i, rstds + i);
  });
  if (!options.amax.empty()) Fp8Amax.cpu(context, y, options.amax);
}

// Columns of the two parameter gradients: a thread owns columns, so the order of summation is that of the rows.
template <class P>
void AddParameterGradients(const Tensor& dy, const Tensor& x, const float* means, const float* rstds, float* gamma_grad,
                           float* beta_grad) {
  using T = typename P::Storage;
  constexpr int64_t kBlock = 32;
  const int64_t h = LastDimension(x), rows = x.size() / h, blocks = (h + kBlock - 1) / kBlock;
  const T *g = dy.as<T>(), *in = x.as<T>();
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kBlock, width = std::min(kBlock, h - begin);
    float gamma_sum[kBlock] = {}, beta_sum[kBlock] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const T *g_row = g + i * h + begin, *x_row = in + i * h + begin;
      const float m = means[i], r = rstds[i];
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const float d = P::Load(g_row[j]);
        gamma_sum[j] += d * ((P::Load(x_row[j]) - m) * r);
        beta_sum[j] += d;
      }
    }
    for (int64_t j = 0; j < width; ++j) {
      gamma_grad[begin + j] += P::Round(gamma_sum[j]);
      beta_grad[begin + j] += P::Round(beta_sum[j]);
    }
  }
}

template <class P, bool kResidual>
void BackwardRow(const typename P::Storage* dy, const typename P::Storage* x, const typename P::Storage* gamma, float offset,
                 float m, float r, const typename P::Storage* residual, int64_t h, typename P::Storage* dx) {
  float sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t j = 0; j < h; ++j) {
    const float t = P::Load(dy[j]) * (P::Load(gamma[j]) + offset);
    sum += t;
    dot += t * ((P::Load(x[j]) - m) * r);
  }
  const float mean_t = sum / static_cast<float>(h), mean_dot = dot / static_cast<float>(h);
#pragma omp simd
  for (int64_t j = 0; j < h; ++j) {
    const float normal = (P::Load(x[j]) - m) * r;
    const float d = P::Round(r * (P::Load(dy[j]) * (P::Load(gamma[j]) + offset) - mean_t - normal * mean_dot));
    dx[j] = P::Store(kResidual ? P::Load(residual[j]) + d : d);
  }
}

void BackwardCpu(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean,
                 const Tensor& rstd, const Tensor& d_residual, const NormOptions& options, const Tensor& dx,
                 const Tensor& gamma_grad, const Tensor& beta_grad) {
  const int64_t h = LastDimension(x), rows = x.size() / h;
  cpu::WithPrecision(x.dtype, options.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const float *means = mean.as<float>(), *rstds = rstd.as<float>();
    AddParameterGradients<P>(dy, x, means, rstds, gamma_grad.as<float>(), beta_grad.as<float>());  // Before dx overwrites dy.
    const T *g = dy.as<T>(), *in = x.as<T>(), *scale = gamma.as<T>();
    const T* residual = d_residual.empty() ? nullptr : d_residual.as<T>();
    T* out = dx.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      if (residual != nullptr) {
        BackwardRow<P, true>(g + i * h, in + i * h, scale, options.gamma_offset, means[i], rstds[i], residual + i * h, h,
                             out + i * h);
      } else {
        BackwardRow<P, false>(g + i * h, in + i * h, scale, options.gamma_offset, means[i], rstds[i], nullptr, h, out + i * h);
      }
    }
  });
  if (!options.amax.empty()) Fp8Amax.cpu(context, dx, options.amax);
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const NormOptions&, const Tensor&, const Tensor&,
        const Tensor&)>
    LayerNormForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
        const NormOptions&, const Tensor&, const Tensor&, const Tensor&)>
    LayerNormBackward{&BackwardCpu};

}  // namespace mbridge
