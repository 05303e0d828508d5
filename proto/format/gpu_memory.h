// What a rank takes of a GPU beside its tensors: for the engine's plan and for the estimate of a client without the engine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mbridge {

// Scratch of a rank's operators: cuBLASLt wants 32 MiB and more on Hopper.
inline constexpr size_t kOperatorWorkspaceBytes = size_t{128} << 20;

// What a process takes before its first tensor: CUDA's context, cuBLASLt's, cuDNN's and our own kernels. Measured on an H200 with
// CUDA 13 as the card's use at the end of a run less the plan's tensors: 549 MiB (1B), 561 (8B), 563 (8B in FP8), 547 (GPT-2
// 124M), 544 (the correlation run).
inline constexpr int64_t kCudaBytes = int64_t{550} << 20;
// Of one NCCL communicator: with the world's and that of a tensor-parallel group of two GPUs it is 1402 MiB in place of 550.
inline constexpr int64_t kCommunicatorBytes = int64_t{425} << 20;

// `overlaps`: data-parallel traffic beside the computation, which has a communicator of its own.
inline constexpr int64_t GpuRuntimeBytes(int64_t tensor_parallel, int64_t data_parallel, bool overlaps) {
  const int64_t world = tensor_parallel * data_parallel > 1 ? 1 : 0;
  const int64_t parts = (tensor_parallel > 1 ? 1 : 0) + (data_parallel > 1 ? 1 : 0) + (overlaps ? 1 : 0);
  return kCudaBytes + (world + parts) * kCommunicatorBytes;
}

}  // namespace mbridge
