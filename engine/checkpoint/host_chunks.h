// A tensor's bytes in host memory, a stretch at a time, wherever the tensor lies.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "engine/core/tensor.h"

namespace mbridge {

// Reads tensors of a GPU through two page-locked buffers: while one is worked on, the next stretch is on its way. One thread.
class HostChunks {
 public:
  // Calls body(data, bytes) for stretches of at most 16 MiB, in order, until one fails. Whoever wrote the tensor has finished: a
  // GPU's streams have been waited for.
  absl::Status ForEach(const Tensor& tensor, const std::function<absl::Status(const void* data, size_t bytes)>& body);

 private:
  struct Stage {
    std::shared_ptr<void> memory;  // Made at the first tensor of a GPU.
    void* copied = nullptr;        // Event.
  };
  std::array<Stage, 2> stages_;
};

}  // namespace mbridge
