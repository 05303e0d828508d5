#include "engine/model/microbatch_inputs.h"

#include <cstring>

#include "engine/core/device.h"

namespace mbridge {
namespace {

constexpr size_t kArrays = 4;

template <class T> Tensor ViewOf(const T* data, DeviceType device, int64_t b, int64_t s) {
  if (data == nullptr) return {};
  return {const_cast<T*>(data), kDTypeOf<T>, device, {b, s}};
}

DeviceMicrobatch ViewsOf(const HostMicrobatch& arrays, DeviceType device, int64_t b, int64_t s) {
  return {ViewOf(arrays.tokens, device, b, s), ViewOf(arrays.labels, device, b, s), ViewOf(arrays.loss_mask, device, b, s),
          ViewOf(arrays.position_ids, device, b, s)};
}

}  // namespace

MicrobatchInputs::MicrobatchInputs(const Context& context, int64_t b, int64_t s) : context_(context), b_(b), s_(s) {
  if (context.device == DeviceType::kCpu) return;
  Device& device = DeviceOf(context.device);
  const size_t bytes = kArrays * static_cast<size_t>(b * s) * sizeof(int32_t);
  memory_ = AllocateZeroed(context.device, bytes, "inputs of a microbatch");
  for (Slot& slot : slots_) {
    slot.host = std::shared_ptr<char>(static_cast<char*>(device.AllocateHost(bytes)), [&device](char* p) { device.FreeHost(p); });
    slot.copied = device.CreateEvent();
  }
}

DeviceMicrobatch MicrobatchInputs::Upload(const HostMicrobatch& host) {
  if (context_.device == DeviceType::kCpu) return ViewsOf(host, DeviceType::kCpu, b_, s_);
  Device& device = DeviceOf(context_.device);
  Slot& slot = slots_[static_cast<size_t>(uploads_ % kSlots)];
  if (uploads_ >= kSlots) device.WaitFor(slot.copied);
  ++uploads_;
  const size_t count = static_cast<size_t>(b_ * s_), bytes = count * sizeof(int32_t);
  const void* const sources[kArrays] = {host.tokens, host.labels, host.loss_mask, host.position_ids};
  for (size_t i = 0; i < kArrays; ++i) {
    if (sources[i] != nullptr) std::memcpy(slot.host.get() + i * bytes, sources[i], bytes);
  }
  device.CopyToDevice(context_, memory_.get(), slot.host.get(), kArrays * bytes);
  device.Record(context_, slot.copied);
  auto* const base = static_cast<char*>(memory_.get());
  const auto words = [&](size_t i) { return sources[i] == nullptr ? nullptr : reinterpret_cast<int32_t*>(base + i * bytes); };
  return ViewsOf({words(0), words(1), reinterpret_cast<float*>(words(2)), words(3)}, context_.device, b_, s_);
}

}  // namespace mbridge
