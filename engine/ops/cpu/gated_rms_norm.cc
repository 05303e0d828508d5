#include "engine/ops/gated_rms_norm.h"

#include <algorithm>
#include <cmath>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

struct Shapes {
  int64_t rows, width, group, gammas;  // group: elements of a group; gammas: those of gamma.
};

Shapes ShapesOf(const Tensor& x, const Matrix& z, const Tensor& gamma, const GatedRmsNormOptions& options) {
  const int64_t width = x.shape[x.shape.rank() - 1], gammas = gamma.empty() ? 0 : gamma.size();
  const Shapes s{x.size() / width, width, width / options.groups, gammas};
  const bool fits = gammas == 0 || gammas == width || gammas == s.group;
  if (z.rows != s.rows || z.cols != width || width % options.groups != 0 || !fits)
    ThrowEngineError("gated norm of {} in {} groups with a gate [{}, {}] and {} weights", x.shape.ToString(), options.groups,
                     z.rows, z.cols, gammas);
  return s;
}

// What the gate does to x before the norm, and after it.
struct Gate {
  bool before, after;
  float Before(float silu) const { return before ? silu : 1.0f; }
  float After(float silu) const { return after ? silu : 1.0f; }
};

Gate GateOf(const GatedRmsNormOptions& options) { return {!options.norm_before_gate, options.norm_before_gate}; }

float Silu(float z) { return z * cpu::Sigmoid(z); }
float SiluSlope(float z) {
  const float s = cpu::Sigmoid(z);
  return s * (1.0f + z * (1.0f - s));
}

void ForwardCpu(const Context&, const Tensor& x, const Matrix& z, const Tensor& gamma, const GatedRmsNormOptions& options,
                const Tensor& y, const Tensor& rstd) {
  const Shapes shapes = ShapesOf(x, z, gamma, options);
  const Gate gate = GateOf(options);
  cpu::WithPrecision(x.dtype, options.norm.precision, [&]<class P>(P) {
    using T = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < shapes.rows * options.groups; ++i) {
      const int64_t row = i / options.groups, begin = i % options.groups * shapes.group, n = shapes.group;
      const T *in = x.as<T>() + row * shapes.width + begin, *zs = static_cast<const T*>(z.data) + row * z.stride + begin;
      T* out = y.as<T>() + row * shapes.width + begin;
      if (shapes.gammas == 0) {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) out[j] = P::Store(P::Load(in[j]) * Silu(P::Load(zs[j])));
        continue;
      }
      const T* g = gamma.as<T>() + (shapes.gammas == shapes.width ? begin : 0);
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t j = 0; j < n; ++j) {
        const float u = P::Load(in[j]) * gate.Before(Silu(P::Load(zs[j])));
        squares += u * u;
      }
      const float r = 1.0f / std::sqrt(squares / static_cast<float>(n) + options.norm.epsilon), o = options.norm.gamma_offset;
      rstd.as<float>()[i] = r;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float silu = Silu(P::Load(zs[j]));
        out[j] = P::Store(P::Load(in[j]) * gate.Before(silu) * r * (P::Load(g[j]) + o) * gate.After(silu));
      }
    }
  });
}

// gamma_grad += the rounded sums over rows, and over groups that share gamma, of dy n.
template <class P>
void AddGammaGradient(const Tensor& dy, const Tensor& x, const Matrix& z, const Tensor& rstd, const Shapes& shapes,
                      const GatedRmsNormOptions& options, const Tensor& gamma_grad) {
  using T = typename P::Storage;
  constexpr int64_t kBlock = 64;
  const int64_t per_group = (shapes.group + kBlock - 1) / kBlock, shared = shapes.gammas == shapes.width ? 1 : options.groups;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < options.groups / shared * per_group; ++block) {
    const int64_t first_group = block / per_group, begin = block % per_group * kBlock,
                  width = std::min(kBlock, shapes.group - begin);
    float sum[kBlock] = {};
    for (int64_t i = 0; i < shapes.rows * shared; ++i) {
      const int64_t row = i / shared, group = first_group + i % shared, at = row * shapes.width + group * shapes.group + begin;
      const T *grad = dy.as<T>() + at, *in = x.as<T>() + at;
      const T* zs = static_cast<const T*>(z.data) + row * z.stride + group * shapes.group + begin;
      const float r = rstd.as<float>()[row * options.groups + group];
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) sum[j] += P::Load(grad[j]) * P::Load(in[j]) * r * Silu(P::Load(zs[j]));
    }
    float* to = gamma_grad.as<float>() + first_group * shapes.group + begin;
    for (int64_t j = 0; j < width; ++j) to[j] += P::Round(sum[j]);
  }
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Matrix& z, const Tensor& gamma, const Tensor& rstd,
                 const GatedRmsNormOptions& options, const Tensor& dx, const Matrix& dz, const Tensor& gamma_grad) {
  const Shapes shapes = ShapesOf(x, z, gamma, options);
  const Gate gate = GateOf(options);
  cpu::WithPrecision(x.dtype, options.norm.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    if (shapes.gammas > 0) AddGammaGradient<P>(dy, x, z, rstd, shapes, options, gamma_grad);  // Before dx overwrites dy.
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < shapes.rows * options.groups; ++i) {
      const int64_t row = i / options.groups, begin = i % options.groups * shapes.group, n = shapes.group;
      const int64_t at = row * shapes.width + begin;
      const T *grad = dy.as<T>() + at, *in = x.as<T>() + at, *zs = static_cast<const T*>(z.data) + row * z.stride + begin;
      T *d_in = dx.as<T>() + at, *d_gate = static_cast<T*>(dz.data) + row * dz.stride + begin;
      if (shapes.gammas == 0) {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          const float d = P::Load(grad[j]), zj = P::Load(zs[j]), value = P::Load(in[j]);
          d_in[j] = P::Store(d * Silu(zj));
          d_gate[j] = P::Store(d * value * SiluSlope(zj));
        }
        continue;
      }
      const T* g = gamma.as<T>() + (shapes.gammas == shapes.width ? begin : 0);
      const float r = rstd.as<float>()[i], o = options.norm.gamma_offset;
      float dot = 0.0f;  // Of the gradient of the normalised values and these.
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < n; ++j) {
        const float silu = Silu(P::Load(zs[j])), normed = P::Load(in[j]) * gate.Before(silu) * r;
        dot += P::Load(grad[j]) * (P::Load(g[j]) + o) * gate.After(silu) * normed;
      }
      const float mean = dot / static_cast<float>(n);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float zj = P::Load(zs[j]), silu = Silu(zj), value = P::Load(in[j]), scaled = P::Load(grad[j]) * (P::Load(g[j]) + o);
        const float normed = value * gate.Before(silu) * r, d = r * (scaled * gate.After(silu) - normed * mean);
        const float d_silu = gate.before ? d * value : scaled * normed;
        d_in[j] = P::Store(d * gate.Before(silu));
        d_gate[j] = P::Store(d_silu * SiluSlope(zj));
      }
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Matrix&, const Tensor&, const GatedRmsNormOptions&, const Tensor&, const Tensor&)>
    GatedRmsNormForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Matrix&, const Tensor&, const Tensor&, const GatedRmsNormOptions&,
        const Tensor&, const Matrix&, const Tensor&)>
    GatedRmsNormBackward{&BackwardCpu};

}  // namespace mbridge
