#include "engine/ops/normal_init.h"

#include <algorithm>
#include <vector>

namespace mbridge {
namespace {

template <class T> void Narrow(const std::vector<float>& from, T* to) {
  std::transform(from.begin(), from.end(), to, [](float x) { return FromFloat<T>(x); });
}

void DrawNormalCpu(const Context&, PhiloxStream position, int sm_count, float mean, float std, const Tensor& out) {
  const auto count = static_cast<size_t>(out.size());
  if (out.dtype == DType::kF32) return CudaNormal(&position, sm_count, mean, std, {out.as<float>(), count});
  std::vector<float> drawn(count);
  CudaNormal(&position, sm_count, mean, std, drawn);
  if (out.dtype == DType::kBF16) return Narrow(drawn, out.as<BFloat16>());
  Narrow(drawn, out.as<Float16>());
}

}  // namespace

Op<void(const Context&, PhiloxStream, int, float, float, const Tensor&)> DrawNormal{&DrawNormalCpu};

}  // namespace mbridge
