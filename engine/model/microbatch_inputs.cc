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

size_t MicrobatchInputs::bytes() const {
  return (sizeof(Words) + kArrays * static_cast<size_t>(b_ * s_) * sizeof(int32_t) + 255) / 256 * 256;
}

MicrobatchInputs::MicrobatchInputs(const Context& context, int64_t b, int64_t s, int places) : context_(context), b_(b), s_(s) {
  if (context.device == DeviceType::kCpu) return;
  Device& device = DeviceOf(context.device);
  memory_ = AllocateZeroed(context.device, bytes() * static_cast<size_t>(places), "inputs of a microbatch");
  for (Slot& slot : slots_) {
    slot.host =
        std::shared_ptr<char>(static_cast<char*>(device.AllocateHost(bytes())), [&device](char* p) { device.FreeHost(p); });
    slot.copied = device.CreateEvent();
  }
}

const uint64_t* MicrobatchInputs::WordsAt(int place) const {
  if (memory_ == nullptr) return nullptr;
  return reinterpret_cast<const uint64_t*>(static_cast<char*>(memory_.get()) + bytes() * static_cast<size_t>(place));
}

DeviceMicrobatch MicrobatchInputs::Upload(const HostMicrobatch& host, int place, const Words& words) {
  if (context_.device == DeviceType::kCpu) return ViewsOf(host, DeviceType::kCpu, b_, s_);
  Device& device = DeviceOf(context_.device);
  Slot& slot = slots_[static_cast<size_t>(uploads_ % kSlots)];
  if (uploads_ >= kSlots) device.WaitFor(slot.copied);
  ++uploads_;
  const size_t array_bytes = static_cast<size_t>(b_ * s_) * sizeof(int32_t);
  const void* const sources[kArrays] = {host.tokens, host.labels, host.loss_mask, host.position_ids};
  std::memcpy(slot.host.get(), words.data(), sizeof(Words));
  for (size_t i = 0; i < kArrays; ++i) {
    if (sources[i] != nullptr) std::memcpy(slot.host.get() + sizeof(Words) + i * array_bytes, sources[i], array_bytes);
  }
  char* const base = static_cast<char*>(memory_.get()) + bytes() * static_cast<size_t>(place);
  device.CopyToDevice(context_, base, slot.host.get(), bytes());
  device.Record(context_, slot.copied);
  const auto at = [&](size_t i) {
    return sources[i] == nullptr ? nullptr : reinterpret_cast<int32_t*>(base + sizeof(Words) + i * array_bytes);
  };
  return ViewsOf({at(0), at(1), reinterpret_cast<float*>(at(2)), at(3)}, context_.device, b_, s_);
}

}  // namespace mbridge
