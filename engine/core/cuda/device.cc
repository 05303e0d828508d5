#include "engine/core/device.h"

#include "engine/core/cuda/check.h"

namespace mbridge::cuda {
namespace {

cudaStream_t StreamOf(const Context& context) { return static_cast<cudaStream_t>(context.stream); }

class CudaDevice : public Device {
 public:
  void* Allocate(size_t bytes, const char* purpose) override {
    void* memory = nullptr;
    if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess) {
      size_t free = 0, total = 0;
      cudaGetLastError();
      cudaMemGetInfo(&free, &total);
      throw EngineError(error == cudaErrorMemoryAllocation ? v1::REASON_OUT_OF_MEMORY : v1::REASON_ENGINE_ERROR,
                        fmt::format("cannot allocate {} MiB of GPU memory for {}: {} ({} of {} MiB are free)", bytes >> 20,
                                    purpose, cudaGetErrorString(error), free >> 20, total >> 20));
    }
    return memory;
  }
  void Free(void* memory) override { cudaFree(memory); }
  void* AllocateHost(size_t bytes) override {
    void* memory = nullptr;
    MB_CUDA(cudaMallocHost(&memory, bytes));
    return memory;
  }
  void FreeHost(void* memory) override { cudaFreeHost(memory); }
  void Zero(const Context& context, void* memory, size_t bytes) override {
    MB_CUDA(cudaMemsetAsync(memory, 0, bytes, StreamOf(context)));
  }
  void CopyToDevice(const Context& context, void* to, const void* host, size_t bytes) override {
    MB_CUDA(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, StreamOf(context)));
  }
  void CopyToHost(const Context& context, void* host, const void* from, size_t bytes) override {
    MB_CUDA(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, StreamOf(context)));
  }
  void CopyOnDevice(const Context& context, void* to, const void* from, size_t bytes) override {
    MB_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, StreamOf(context)));
  }
  void Synchronize(const Context& context) override { MB_CUDA(cudaStreamSynchronize(StreamOf(context))); }
};

CudaDevice g_device;
const bool g_registered = (RegisterDevice(DeviceType::kCuda, &g_device), true);

}  // namespace
}  // namespace mbridge::cuda
