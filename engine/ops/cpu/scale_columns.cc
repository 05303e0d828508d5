#include "engine/ops/scale_columns.h"

#include <numeric>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void ScaleColumnsCpu(const Context&, const Tensor& x, const ColumnFactors& factors, DType precision, const Tensor& y) {
  const int64_t n = x.shape[x.shape.rank() - 1], rows = x.size() / n;
  if (y.size() != x.size() || std::accumulate(factors.widths.begin(), factors.widths.begin() + factors.parts, int64_t{0}) != n)
    ThrowEngineError("{} scaled by columns into {}", x.shape.ToString(), y.shape.ToString());
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = x.as<T>() + row * n;
      T* out = y.as<T>() + row * n;
      for (int part = 0; part < factors.parts; ++part) {
        const int64_t width = factors.widths[part];
        const float factor = factors.factors[part];
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) out[j] = P::Store(P::Load(in[j]) * factor);
        in += width;
        out += width;
      }
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const ColumnFactors&, DType, const Tensor&)> ScaleColumns{&ScaleColumnsCpu};

}  // namespace mbridge
