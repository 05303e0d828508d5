#include "engine/core/arena.h"

#include <algorithm>

#include "engine/core/device.h"

namespace mbridge {

Arena::Arena(size_t capacity, DeviceType device)
    : device_(device), planning_(false), capacity_((capacity + kAlignment - 1) / kAlignment * kAlignment) {
  if (capacity_ == 0) return;
  Device& owner = DeviceOf(device);
  auto* memory = static_cast<std::byte*>(owner.Allocate(capacity_, "activations and workspaces"));
  memory_ = std::shared_ptr<std::byte[]>(memory, [&owner](std::byte* p) { owner.Free(p); });
}

Tensor Arena::Allocate(DType dtype, const Shape& shape) {
  const size_t bytes = static_cast<size_t>(shape.NumElements()) * SizeOf(dtype);
  const size_t begin = used_;
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  peak_ = std::max(peak_, used_);
  if (planning_) return {nullptr, dtype, device_, shape};
  if (used_ > capacity_) ThrowEngineError("activation arena of {} bytes is full, {} more were asked for", capacity_, bytes);
  return {memory_.get() + begin, dtype, device_, shape};
}

}  // namespace mbridge
