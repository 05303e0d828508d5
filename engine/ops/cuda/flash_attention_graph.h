// One direction of flash attention as a cuDNN operation graph with its execution plan. Hides cudnn-frontend, whose headers are
// heavy.
#pragma once

#include <memory>
#include <string>

#include "engine/ops/flash_attention.h"

namespace mbridge::cuda {

// Empty, or why this program has no flash attention.
std::string FlashAttentionBackend();

// Whether an error text of cudnn-frontend, which passes the status of cuDNN or CUDA on in words alone, says that memory of the
// host or of the GPU could not be had.
bool SaysAllocationFailed(const std::string& message);

// Bound to a thread: cuDNN allows one thread at a time for each handle.
class CudnnHandle {
 public:
  CudnnHandle();
  ~CudnnHandle();
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  void* Use(void* stream);  // The cudnnHandle_t, set to this stream.

 private:
  void* handle_ = nullptr;
};

class FlashAttentionGraph {
 public:
  // Device addresses; gradients are null in the forward.
  struct Pointers {
    void* qkv;
    void* context;
    void* stats;
    void* d_context = nullptr;
    void* d_qkv = nullptr;
    void* random = nullptr;   // I64 [2], with dropout.
    void* packing = nullptr;  // FlashPacking's arrays, with packed sequences.
  };

  // For the current GPU. `handle` is a cudnnHandle_t. Throws EngineError with cuDNN's words where it finds no engine.
  static std::unique_ptr<FlashAttentionGraph> ForGpu(const FlashAttentionOptions& options, DType dtype, bool backward,
                                                     void* handle);
  // Whether there is an engine for a GPU that is not there, described by cuDNN's device property JSON: throws as above.
  static void CheckOnDescribedGpu(const FlashAttentionOptions& options, DType dtype, bool backward,
                                  const std::string& device_json);
  virtual ~FlashAttentionGraph() = default;
  virtual int64_t workspace_bytes() const = 0;
  virtual std::string engine() const = 0;  // cuDNN's name of the chosen engine and its knobs.
  virtual void Run(void* handle, const Pointers& pointers, void* workspace) const = 0;
};

}  // namespace mbridge::cuda
