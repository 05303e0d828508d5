#include "engine/ops/bias_add.h"

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void BiasAddCpu(const Context&, const Tensor& x, const Tensor& bias, DType precision) {
  const int64_t n = bias.size(), rows = x.size() / n;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    T* values = x.as<T>();
    const T* b = bias.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      T* row = values + i * n;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) row[j] = P::Store(P::Load(row[j]) + P::Load(b[j]));
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, DType)> BiasAdd{&BiasAddCpu};

}  // namespace mbridge
