#include "engine/ops/gradient_sums.h"

#include <algorithm>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void AddGradientCpu(const Context&, const Tensor& grad, DType precision, const Tensor& main_grad) {
  const int64_t count = main_grad.size();
  if (grad.size() != count) ThrowEngineError("gradient of {} elements for {}", grad.size(), count);
  cpu::WithPrecision(grad.dtype, precision, [&]<class P>(P) {
    const auto* g = grad.as<typename P::Storage>();
    float* sum = main_grad.as<float>();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; ++i) sum[i] += P::Load(g[i]);
  });
}

void AddColumnSumsCpu(const Context&, const Tensor& x, DType precision, const Tensor& main_grad) {
  constexpr int64_t kBlock = 64;
  const int64_t n = main_grad.size(), rows = x.size() / n, blocks = (n + kBlock - 1) / kBlock;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    const auto* values = x.as<typename P::Storage>();
    float* out = main_grad.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kBlock, width = std::min(kBlock, n - begin);
      float sum[kBlock] = {};
      for (int64_t i = 0; i < rows; ++i) {
        const auto* row = values + i * n + begin;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) sum[j] += P::Load(row[j]);
      }
      for (int64_t j = 0; j < width; ++j) out[begin + j] += P::Round(sum[j]);
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, DType, const Tensor&)> AddGradient{&AddGradientCpu};
Op<void(const Context&, const Tensor&, DType, const Tensor&)> AddColumnSums{&AddColumnSumsCpu};

}  // namespace mbridge
