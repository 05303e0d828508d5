#include "engine/core/arena.h"

#include <algorithm>
#include <cstdlib>

namespace mbridge {

Arena::Arena(size_t capacity) : planning_(false), capacity_((capacity + kAlignment - 1) / kAlignment * kAlignment) {
  void* memory = capacity_ == 0 ? nullptr : std::aligned_alloc(kAlignment, capacity_);
  if (capacity_ != 0 && memory == nullptr) {
    throw EngineError(v1::REASON_OUT_OF_MEMORY, fmt::format("cannot allocate {} bytes for activations", capacity_));
  }
  memory_.reset(static_cast<std::byte*>(memory));
}

void Arena::Free::operator()(std::byte* p) const { std::free(p); }

Tensor Arena::Allocate(DType dtype, const Shape& shape) {
  const size_t bytes = static_cast<size_t>(shape.NumElements()) * SizeOf(dtype);
  const size_t begin = used_;
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  peak_ = std::max(peak_, used_);
  if (planning_) return {nullptr, dtype, DeviceType::kCpu, shape};
  if (used_ > capacity_) ThrowEngineError("activation arena of {} bytes is full, {} more were asked for", capacity_, bytes);
  return {memory_.get() + begin, dtype, DeviceType::kCpu, shape};
}

}  // namespace mbridge
