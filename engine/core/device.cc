#include "engine/core/device.h"

#include <cstdlib>
#include <cstring>

#include "engine/core/side_stream.h"

namespace mbridge {
namespace {

class CpuDevice : public Device {
 public:
  void* Allocate(size_t bytes, const char* purpose) override {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == nullptr && bytes != 0) {
      throw EngineError(v1::REASON_OUT_OF_MEMORY, fmt::format("cannot allocate {} bytes for {}", bytes, purpose));
    }
    return memory;
  }
  void Free(void* memory) override { std::free(memory); }
  void* AllocateHost(size_t bytes) override { return Allocate(bytes, "host staging"); }
  void FreeHost(void* memory) override { Free(memory); }
  void Zero(const Context&, void* memory, size_t bytes) override { std::memset(memory, 0, bytes); }
  void CopyToDevice(const Context&, void* to, const void* host, size_t bytes) override { std::memcpy(to, host, bytes); }
  void CopyToHost(const Context&, void* host, const void* from, size_t bytes) override { std::memcpy(host, from, bytes); }
  void CopyOnDevice(const Context&, void* to, const void* from, size_t bytes) override { std::memmove(to, from, bytes); }
  void* CreateEvent() override { return nullptr; }
  void Record(const Context&, void*) override {}
  void WaitFor(void*) override {}
  Context MakeContext(size_t) override { return {}; }
  std::unique_ptr<SideStream> MakeSideStream(const Context& main, int slots) override { return MakeThreadStream(main, slots); }
  void Synchronize(const Context&) override {}
  void BeginRecording(const Context&) override { ThrowEngineError("the CPU records no graphs"); }
  Graph EndRecording(const Context&) override { ThrowEngineError("the CPU records no graphs"); }
  void DropRecording(const Context&) override {}
  void Launch(const Context&, const Graph&) override { ThrowEngineError("the CPU launches no graphs"); }
  Memory MemoryNow() override { return {}; }
};

Device* g_cuda = nullptr;

}  // namespace

Device& DeviceOf(DeviceType type) {
  static CpuDevice cpu;
  if (type == DeviceType::kCpu) return cpu;
  if (g_cuda == nullptr) ThrowEngineError("this program was built without CUDA: start mbrank-cuda, or train with --device cpu");
  return *g_cuda;
}

bool HasDevice(DeviceType type) { return type == DeviceType::kCpu || g_cuda != nullptr; }

void RegisterDevice(DeviceType type, Device* device) {
  if (type == DeviceType::kCuda) g_cuda = device;
}

std::shared_ptr<void> AllocateZeroed(DeviceType type, size_t bytes, const char* purpose) {
  Device& device = DeviceOf(type);
  std::shared_ptr<void> memory(device.Allocate(bytes, purpose), [&device](void* p) { device.Free(p); });
  device.Zero({.device = type}, memory.get(), bytes);
  device.Synchronize({.device = type});
  return memory;
}

}  // namespace mbridge
