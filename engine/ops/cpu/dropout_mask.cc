#include "engine/ops/dropout_mask.h"

#include <span>

namespace mbridge {
namespace {

std::span<uint8_t> SpanOf(const Tensor& keep) { return {keep.as<uint8_t>(), static_cast<size_t>(keep.size())}; }

void EagerCpu(const Context&, PhiloxStream position, int sm_count, double p, int element_bytes, const Tensor& keep) {
  EagerDropoutMask(&position, sm_count, p, element_bytes, SpanOf(keep));
}

void CompiledCpu(const Context&, int64_t seed, double p, const Tensor& keep) { CompiledDropoutMask(seed, p, SpanOf(keep)); }

}  // namespace

Op<void(const Context&, PhiloxStream, int, double, int, const Tensor&)> DrawEagerDropoutMask{&EagerCpu};
Op<void(const Context&, int64_t, double, const Tensor&)> DrawCompiledDropoutMask{&CompiledCpu};

}  // namespace mbridge
