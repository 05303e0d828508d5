#include "engine/checkpoint/host_chunks.h"

#include <algorithm>
#include <vector>

#include "engine/core/device.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr size_t kChunk = size_t{4} << 20;

}  // namespace

absl::Status ForHostChunks(const Tensor& tensor, const std::function<absl::Status(const void* data, size_t bytes)>& body) {
  const char* data = static_cast<const char*>(tensor.data);
  std::vector<char> staging;
  for (size_t done = 0; done < tensor.bytes();) {
    const size_t bytes = std::min(kChunk, tensor.bytes() - done);
    const char* stretch = data + done;
    if (tensor.device != DeviceType::kCpu) {
      staging.resize(bytes);
      DeviceOf(tensor.device).CopyToHost({.device = tensor.device}, staging.data(), stretch, bytes);
      DeviceOf(tensor.device).Synchronize({.device = tensor.device});
      stretch = staging.data();
    }
    MB_RETURN_IF_ERROR(body(stretch, bytes));
    done += bytes;
  }
  return absl::OkStatus();
}

}  // namespace mbridge
