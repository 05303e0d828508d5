#include "engine/ops/scale.h"

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void ScaleCpu(const Context&, const Tensor& x, float factor, DType precision, const Tensor& y) {
  const int64_t count = x.size();
  if (y.size() != count) ThrowEngineError("{} elements scaled into {}", count, y.size());
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T* in = x.as<T>();
    T* out = y.as<T>();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; ++i) out[i] = P::Store(P::Load(in[i]) * factor);
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, float, DType, const Tensor&)> Scale{&ScaleCpu};

}  // namespace mbridge
