// Memory of a device and copies to and from it, behind one interface, so that code outside of the CUDA folders never names CUDA.
#pragma once

#include <cstddef>
#include <memory>

#include "engine/core/op.h"

namespace mbridge {

class SideStream;

class Device {
 public:
  virtual ~Device() = default;
  // At least 256-byte aligned on CUDA, 64 on the CPU; not initialised. Throws REASON_OUT_OF_MEMORY naming `purpose` and both
  // sizes.
  virtual void* Allocate(size_t bytes, const char* purpose) = 0;
  virtual void Free(void* memory) = 0;
  // Host memory that copies do not have to stage: page-locked on CUDA.
  virtual void* AllocateHost(size_t bytes) = 0;
  virtual void FreeHost(void* memory) = 0;
  // In stream order on CUDA, at once on the CPU. The host side of a copy must stay as it is until the stream has passed it.
  virtual void Zero(const Context& context, void* memory, size_t bytes) = 0;
  virtual void CopyToDevice(const Context& context, void* to, const void* host, size_t bytes) = 0;
  virtual void CopyToHost(const Context& context, void* host, const void* from, size_t bytes) = 0;
  virtual void CopyOnDevice(const Context& context, void* to, const void* from, size_t bytes) = 0;
  // A place in a stream that the host can wait for. Freed with the device's process.
  virtual void* CreateEvent() = 0;
  virtual void Record(const Context& context, void* event) = 0;
  virtual void WaitFor(void* event) = 0;
  // The context of this process's calling thread: the first visible GPU with a stream and `workspace_bytes` of its own. Throws
  // REASON_ENGINE_ERROR where there is no driver, no GPU, or none that this build has kernels for.
  virtual Context MakeContext(size_t workspace_bytes) = 0;
  // engine/core/side_stream.h's.
  virtual std::unique_ptr<SideStream> MakeSideStream(const Context& main, int slots) = 0;
  // Waits for all work of the context's stream. Throws REASON_ENGINE_ERROR for a fault of an earlier kernel.
  virtual void Synchronize(const Context& context) = 0;
  // Work enqueued between the first two calls is recorded instead of done, and becomes a graph; Launch enqueues it, as often as
  // wanted. DropRecording ends a recording that failed. Throw REASON_ENGINE_ERROR, always on the CPU.
  struct Graph {
    std::shared_ptr<void> executable;
    int64_t nodes = 0;  // Kernels, copies and fills.
  };
  virtual void BeginRecording(const Context& context) = 0;
  virtual Graph EndRecording(const Context& context) = 0;
  virtual void DropRecording(const Context& context) = 0;
  virtual void Launch(const Context& context, const Graph& graph) = 0;
  struct Memory {
    int64_t free_bytes = 0, total_bytes = 0;
  };
  // Of the whole device, of all processes; zeros on the CPU.
  virtual Memory MemoryNow() = 0;
};

// Throws EngineError for a device that this program was built without.
Device& DeviceOf(DeviceType type);
// Whether this program was built with it; a GPU may still be missing.
bool HasDevice(DeviceType type);
// Called once by the CUDA code when it is linked in. `device` lives as long as the program.
void RegisterDevice(DeviceType type, Device* device);

// Zero-filled memory that frees itself.
std::shared_ptr<void> AllocateZeroed(DeviceType type, size_t bytes, const char* purpose);

}  // namespace mbridge
