// Bump allocation for activations and workspaces: allocated once, reset per microbatch or step, never grown inside a step.
// Not thread-safe.
#pragma once

#include <cstddef>
#include <memory>

#include "engine/core/tensor.h"

namespace mbridge {

class Arena {
 public:
  static constexpr size_t kAlignment = 256;  // What cuDNN and cuBLASLt like best; a multiple of the CPU's cache line.

  // A planning arena has no memory: it hands out null tensors and counts, to learn the size needed.
  static Arena Planning(DeviceType device = DeviceType::kCpu) { return Arena(device); }
  // Not initialised. Throws REASON_OUT_OF_MEMORY when the memory cannot be had.
  explicit Arena(size_t capacity, DeviceType device = DeviceType::kCpu);
  Arena(Arena&&) = default;
  Arena& operator=(Arena&&) = default;

  // Uninitialised memory. Throws REASON_ENGINE_ERROR when full: sizes are planned.
  Tensor Allocate(DType dtype, const Shape& shape);
  void Reset() { used_ = 0; }

  // A position to come back to: everything allocated after it is released.
  size_t Mark() const { return used_; }
  void Release(size_t mark) { used_ = mark; }

  size_t capacity() const { return capacity_; }
  size_t peak() const { return peak_; }

 private:
  explicit Arena(DeviceType device) : device_(device) {}
  std::shared_ptr<std::byte[]> memory_;
  DeviceType device_;
  bool planning_ = true;
  size_t capacity_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
};

}  // namespace mbridge
