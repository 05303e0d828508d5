#include "engine/checkpoint/host_chunks.h"

#include <algorithm>

#include "engine/core/device.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr size_t kChunk = size_t{16} << 20;

}  // namespace

absl::Status HostChunks::ForEach(const Tensor& tensor, const std::function<absl::Status(const void* data, size_t bytes)>& body) {
  const char* const data = static_cast<const char*>(tensor.data);
  const size_t total = tensor.bytes();
  const auto size_at = [total](size_t offset) { return std::min(kChunk, total - offset); };
  if (tensor.device == DeviceType::kCpu) {
    for (size_t offset = 0; offset < total; offset += kChunk) MB_RETURN_IF_ERROR(body(data + offset, size_at(offset)));
    return absl::OkStatus();
  }
  Device& device = DeviceOf(tensor.device);
  const Context context{.device = tensor.device};
  for (Stage& stage : stages_) {
    if (stage.memory != nullptr) continue;
    stage.memory = {device.AllocateHost(kChunk), [&device](void* memory) { device.FreeHost(memory); }};
    stage.copied = device.CreateEvent();
  }
  const auto fetch = [&](size_t offset) {
    const Stage& stage = stages_[offset / kChunk % 2];
    device.CopyToHost(context, stage.memory.get(), data + offset, size_at(offset));
    device.Record(context, stage.copied);
  };
  if (total > 0) fetch(0);
  for (size_t offset = 0; offset < total; offset += kChunk) {
    if (offset + kChunk < total) fetch(offset + kChunk);
    const Stage& stage = stages_[offset / kChunk % 2];
    device.WaitFor(stage.copied);
    if (absl::Status status = body(stage.memory.get(), size_at(offset)); !status.ok()) {
      device.Synchronize(context);  // Nothing may arrive in memory that is given back.
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace mbridge
