#include "engine/ops/dropout_mask.h"

#include <span>

namespace mbridge {
namespace {

std::span<uint8_t> SpanOf(const Tensor& keep) { return {keep.as<uint8_t>(), static_cast<size_t>(keep.size())}; }

PhiloxStream StreamOf(const MaskPosition& position) {
  if (position.device_words != nullptr) ThrowEngineError("a mask's position in device memory, on the CPU");
  return position.stream;
}

void EagerCpu(const Context&, MaskPosition position, int sm_count, double p, int element_bytes, const Tensor& keep) {
  PhiloxStream stream = StreamOf(position);
  EagerDropoutMask(&stream, sm_count, p, element_bytes, SpanOf(keep));
}

void CompiledCpu(const Context&, int64_t seed, double p, const Tensor& keep) { CompiledDropoutMask(seed, p, SpanOf(keep)); }

void CompiledAtCpu(const Context&, MaskPosition position, double p, const Tensor& keep) {
  PhiloxStream stream = StreamOf(position);
  CompiledDropoutMask(DrawCompiledSeed(&stream), p, SpanOf(keep));
}

}  // namespace

Op<void(const Context&, MaskPosition, int, double, int, const Tensor&)> DrawEagerDropoutMask{&EagerCpu};
Op<void(const Context&, int64_t, double, const Tensor&)> DrawCompiledDropoutMask{&CompiledCpu};
Op<void(const Context&, MaskPosition, double, const Tensor&)> DrawCompiledDropoutMaskAt{&CompiledAtCpu};

}  // namespace mbridge
