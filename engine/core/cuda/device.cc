#include "engine/core/device.h"

#include <unistd.h>

#include <chrono>
#include <limits>
#include <map>
#include <thread>
#include <vector>

#include "engine/core/cuda/check.h"
#include "engine/core/cuda/watch.h"
#include "engine/core/gpu_architectures.h"
#include "engine/core/side_stream.h"
#include "engine/core/watchdog.h"

namespace mbridge::cuda {
namespace {

cudaStream_t StreamOf(const Context& context) { return static_cast<cudaStream_t>(context.stream); }

// Asks `query` until the GPU is done; runs the watches meanwhile.
template <class Query> void AwaitWatched(const Query& query) {
  const auto begin = std::chrono::steady_clock::now();
  const WaitNote note;
  for (int64_t spin = 1;; ++spin) {
    const cudaError_t state = query();
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) MB_CUDA(state);
    if (spin % 1024 != 0) continue;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    RunWatches(waited.count());
    if (waited.count() > 0.1) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Events order the two streams; the host never waits.
class CudaSideStream : public SideStream {
 public:
  CudaSideStream(const Context& main, int slots) : main_(main) {
    // Blocks of its kernels come first where an SM becomes free: the peers wait for them.
    int least = 0, greatest = 0;
    MB_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    MB_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    context_ = {DeviceType::kCuda, stream, nullptr, 0};
    for (int i = 0; i < slots; ++i) slots_.push_back({NewEvent(), NewEvent()});
  }
  ~CudaSideStream() override {
    for (const Slot& slot : slots_) {
      cudaEventDestroy(slot.begin);
      cudaEventDestroy(slot.end);
    }
    cudaStreamDestroy(StreamOf(context_));
  }
  CudaSideStream(const CudaSideStream&) = delete;
  CudaSideStream& operator=(const CudaSideStream&) = delete;

  const Context& context() const override { return context_; }
  void Start(int slot, std::function<void()> work) override {
    const Slot& events = slots_.at(static_cast<size_t>(slot));
    MB_CUDA(cudaEventRecord(events.begin, StreamOf(main_)));
    MB_CUDA(cudaStreamWaitEvent(StreamOf(context_), events.begin, 0));
    work();
    MB_CUDA(cudaEventRecord(events.end, StreamOf(context_)));
  }
  void Join(int slot) override { MB_CUDA(cudaStreamWaitEvent(StreamOf(main_), slots_.at(static_cast<size_t>(slot)).end, 0)); }
  void Stop() override {}

 private:
  struct Slot {
    cudaEvent_t begin, end;
  };
  static cudaEvent_t NewEvent() {
    cudaEvent_t event = nullptr;
    MB_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }

  const Context main_;
  Context context_;
  std::vector<Slot> slots_;
};

class CudaDevice : public Device {
 public:
  void* Allocate(size_t bytes, const char* purpose) override {
    void* memory = nullptr;
    if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess)
      ThrowCuda(error, fmt::format("cannot allocate {} MiB of GPU memory for {}", bytes >> 20, purpose));
    return memory;
  }
  void Free(void* memory) override { cudaFree(memory); }
  void* AllocateHost(size_t bytes) override {
    void* memory = nullptr;
    if (const cudaError_t error = cudaMallocHost(&memory, bytes); error != cudaSuccess) {
      cudaGetLastError();
      const int64_t free = int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
      throw EngineError(error == cudaErrorMemoryAllocation ? v1::REASON_OUT_OF_MEMORY : v1::REASON_ENGINE_ERROR,
                        fmt::format("cannot allocate {} MiB of page-locked host memory: {} ({} MiB of host memory are free)",
                                    bytes >> 20, cudaGetErrorString(error), free >> 20));
    }
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
    if (HasWatches()) {
      // Into pageable memory the copy itself waits for the stream, where no watch runs.
      cudaPointerAttributes attributes{};
      MB_CUDA(cudaPointerGetAttributes(&attributes, host));
      if (attributes.type == cudaMemoryTypeUnregistered) Synchronize(context);
    }
    MB_CUDA(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, StreamOf(context)));
  }
  void CopyOnDevice(const Context& context, void* to, const void* from, size_t bytes) override {
    MB_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, StreamOf(context)));
  }
  void* CreateEvent() override {
    cudaEvent_t event = nullptr;
    MB_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    return event;
  }
  void Record(const Context& context, void* event) override {
    MB_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), StreamOf(context)));
  }
  void WaitFor(void* event) override {
    if (!HasWatches()) {
      MB_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
      return;
    }
    AwaitWatched([&] { return cudaEventQuery(static_cast<cudaEvent_t>(event)); });
  }
  Context MakeContext(size_t workspace_bytes) override {
    // The agent leaves one GPU visible to each rank.
    cudaDeviceProp gpu{};
    if (const cudaError_t error = cudaGetDeviceProperties(&gpu, 0); error != cudaSuccess) ThrowNoGpu(error, "the first GPU");
    if (const std::string why = WhyNoKernels(gpu.name, 10 * gpu.major + gpu.minor, BuiltGpuArchitectures()); !why.empty())
      throw EngineError(v1::REASON_ENGINE_ERROR, why);
    MB_CUDA(cudaSetDevice(0));
    cudaStream_t stream = nullptr;
    MB_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return {DeviceType::kCuda, stream, Allocate(workspace_bytes, "operator workspace"), workspace_bytes};
  }
  std::unique_ptr<SideStream> MakeSideStream(const Context& main, int slots) override {
    return std::make_unique<CudaSideStream>(main, slots);
  }
  void Synchronize(const Context& context) override {
    if (!HasWatches()) {
      MB_CUDA(cudaStreamSynchronize(StreamOf(context)));
      return;
    }
    AwaitWatched([&] { return cudaStreamQuery(StreamOf(context)); });
    NoteIdle();
  }
  void BeginRecording(const Context& context) override {
    MB_CUDA(cudaStreamBeginCapture(StreamOf(context), cudaStreamCaptureModeThreadLocal));
  }
  Graph EndRecording(const Context& context) override {
    cudaGraph_t graph = nullptr;
    MB_CUDA(cudaStreamEndCapture(StreamOf(context), &graph));
    size_t nodes = 0;
    cudaGraphExec_t executable = nullptr;
    const cudaError_t counted = cudaGraphGetNodes(graph, nullptr, &nodes);
    const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    MB_CUDA(made);
    const auto free = [](void* e) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e)); };
    Graph recorded{{executable, free}, static_cast<int64_t>(nodes)};
    MB_CUDA(counted);
    return recorded;
  }
  void DropRecording(const Context& context) override {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(StreamOf(context), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
  }
  void Launch(const Context& context, const Graph& graph) override {
    MB_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.executable.get()), StreamOf(context)));
  }
  Memory MemoryNow() override {
    size_t free = 0, total = 0;
    MB_CUDA(cudaMemGetInfo(&free, &total));
    return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
  }
};

std::map<int, std::function<void(double)>> g_watches;
int g_next_watch = 0;

CudaDevice g_device;
const bool g_registered = (RegisterDevice(DeviceType::kCuda, &g_device), true);

}  // namespace

int AddWatch(std::function<void(double)> check) {
  g_watches[++g_next_watch] = std::move(check);
  return g_next_watch;
}

void RemoveWatch(int key) { g_watches.erase(key); }

void RunWatches(double waited_seconds) {
  try {
    for (const auto& [key, check] : g_watches) check(waited_seconds);
  } catch (...) {
    // The kernel that hangs may belong to any of the groups: all give up, or the unwinding waits for it.
    for (const auto& [key, check] : g_watches) {
      try {
        check(std::numeric_limits<double>::infinity());
      } catch (const EngineError&) {}
    }
    throw;
  }
}

bool HasWatches() { return !g_watches.empty(); }

}  // namespace mbridge::cuda
