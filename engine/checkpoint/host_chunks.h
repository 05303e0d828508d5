// A tensor's bytes in host memory, a stretch at a time, wherever the tensor lies.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "engine/core/tensor.h"

namespace mbridge {

// Calls body(data, bytes) for stretches of at most 4 MiB, in order, until one fails. Waits for a GPU's earlier work.
absl::Status ForHostChunks(const Tensor& tensor, const std::function<absl::Status(const void* data, size_t bytes)>& body);

}  // namespace mbridge
