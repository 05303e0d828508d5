#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/comm/cuda/nccl_faults.h"
#include "engine/comm/file_store.h"
#include "engine/comm/group_part.h"
#include "engine/comm/nccl.h"
#include "engine/core/cuda/check.h"
#include "engine/core/cuda/watch.h"
#include "engine/core/device.h"
#include "engine/core/watchdog.h"

namespace mbridge::cuda {
namespace {

ncclDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return ncclFloat32;
    case DType::kBF16: return ncclBfloat16;
    case DType::kF16: return ncclFloat16;
    case DType::kF64: return ncclFloat64;
    case DType::kI32: return ncclInt32;
    case DType::kI64: return ncclInt64;
    case DType::kU8: return ncclUint8;
  }
  ThrowEngineError("no NCCL type for {}", NameOf(dtype));
}

class NcclCommunicator : public Communicator {
 public:
  explicit NcclCommunicator(const NcclOptions& options)
      : options_(options), stream_(static_cast<cudaStream_t>(options.context.stream)) {
    const WaitNote note("connecting", options.group);
    FileStore store(options.directory, options.group, options.timeout_seconds);
    ncclUniqueId id;
    if (options.rank == 0) {
      Check(ncclGetUniqueId(&id), "ncclGetUniqueId");
      store.set("nccl-id", std::vector<char>(id.internal, id.internal + sizeof(id.internal)));
    } else {
      const std::vector<char> bytes = store.get("nccl-id");
      if (bytes.size() != sizeof(id.internal))
        ThrowEngineError("the NCCL id of group {} has {} bytes", options.group, bytes.size());
      std::memcpy(id.internal, bytes.data(), bytes.size());
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    // The other mode starts a thread for every collective, which makes an iteration of a small tensor-parallel model three times
    // as long. Where NCCL waits for a peer inside a call, here and in the first collectives, the process's watchdog ends it.
    config.blocking = 1;
    Check(ncclCommInitRankConfig(&comm_, options.size, id, options.rank, &config), "connecting");
    watch_ = AddWatch([this](double waited) { CheckPeers(waited); });
  }
  ~NcclCommunicator() override {
    RemoveWatch(watch_);
    if (comm_ != nullptr) Leave();
    if (staging_ != nullptr) DeviceOf(DeviceType::kCuda).Free(staging_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  void AllReduce(const Tensor& tensor, ReduceOp op) override {
    const ncclRedOp_t operation = op == ReduceOp::kSum ? ncclSum : ncclMax;
    Run("all-reduce", tensor, tensor, [&](const void* in, void* out) {
      return ncclAllReduce(in, out, static_cast<size_t>(tensor.size()), TypeOf(tensor.dtype), operation, comm_, stream_);
    });
  }
  void ReduceScatter(const Tensor& input, const Tensor& output) override {
    RequireParts(output, input, "reduce-scatter");
    Run("reduce-scatter", input, output, [&](const void* in, void* out) {
      return ncclReduceScatter(in, out, static_cast<size_t>(output.size()), TypeOf(output.dtype), ncclSum, comm_, stream_);
    });
  }
  void AllGather(const Tensor& input, const Tensor& output) override {
    RequireParts(input, output, "all-gather");
    Run("all-gather", input, output, [&](const void* in, void* out) {
      return ncclAllGather(in, out, static_cast<size_t>(input.size()), TypeOf(input.dtype), comm_, stream_);
    });
  }
  void Broadcast(const Tensor& tensor, int root) override {
    Run("broadcast", tensor, tensor, [&](const void* in, void* out) {
      return ncclBroadcast(in, out, static_cast<size_t>(tensor.size()), TypeOf(tensor.dtype), root, comm_, stream_);
    });
  }
  void Barrier() override {
    int64_t one = 1;
    AllReduce({&one, DType::kI64, DeviceType::kCpu, {1}}, ReduceOp::kSum);
  }
  std::unique_ptr<Communicator> Split(const std::vector<int>& ranks, const std::string& name) override {
    const GroupPart place = PartOfGroup(options_.group, rank(), size(), ranks, name);
    if (place.size == 1) return MakeSelfCommunicator();
    NcclOptions part = options_;
    part.group = place.group;
    part.rank = place.rank;
    part.size = place.size;
    return std::make_unique<NcclCommunicator>(part);
  }
  std::unique_ptr<Communicator> Twin(const Context& context) override {
    NcclOptions twin = options_;
    twin.group = fmt::format("{}.twin{}", options_.group, ++twins_);
    twin.context = context;
    return std::make_unique<NcclCommunicator>(twin);
  }

 private:
  void RequireParts(const Tensor& part, const Tensor& whole, const char* what) const {
    if (part.size() * size() != whole.size() || part.dtype != whole.dtype) {
      ThrowEngineError("{} of {} {} over {} ranks with {} {}", what, NameOf(part.dtype), part.shape.ToString(), size(),
                       NameOf(whole.dtype), whole.shape.ToString());
    }
  }

  // Enqueues on device tensors; host tensors go through staging memory and are waited for.
  template <class F> void Run(const char* what, const Tensor& input, const Tensor& output, F&& enqueue) {
    if (comm_ == nullptr) {
      throw EngineError(v1::REASON_PEER_LOST,
                        fmt::format("{}: the group {} is broken since an earlier error", what, options_.group));
    }
    NoteEnqueued(what, options_.group);
    if (input.device == DeviceType::kCuda) {
      Check(enqueue(input.data, output.data), what);
      return;
    }
    const size_t in_bytes = (input.bytes() + 255) / 256 * 256;
    Stage(in_bytes + output.bytes());
    char* const in = static_cast<char*>(staging_);
    char* const out = in + in_bytes;
    MB_CUDA(cudaMemcpyAsync(in, input.data, input.bytes(), cudaMemcpyHostToDevice, stream_));
    Check(enqueue(in, out), what);
    // Through the device: into pageable memory CUDA's own copy waits for the peers where no watch runs.
    Device& device = DeviceOf(DeviceType::kCuda);
    device.CopyToHost(options_.context, output.data, out, output.bytes());
    device.Synchronize(options_.context);
  }

  void Stage(size_t bytes) {
    if (bytes <= staged_bytes_) return;
    DeviceOf(DeviceType::kCuda).Synchronize(options_.context);
    if (staging_ != nullptr) MB_CUDA(cudaFree(staging_));
    staging_ = nullptr, staged_bytes_ = 0;
    staging_ = DeviceOf(DeviceType::kCuda).Allocate(bytes, "the staging of collectives");
    staged_bytes_ = bytes;
  }

  // Together with the peers, which may have less of the last collectives behind them; alone where a fault unwinds.
  void Leave() {
    if (std::uncaught_exceptions() > 0) {
      ncclCommAbort(comm_);
      return;
    }
    const WaitNote note("leaving", options_.group);
    const std::optional<ncclResult_t> result = Finalize();
    if (!result) return;  // The process ends soon, and with it the thread that still waits for the peers.
    if (*result == ncclSuccess)
      ncclCommDestroy(comm_);
    else
      ncclCommAbort(comm_);
  }

  // Nothing where peers do not come in time: NCCL is still inside the call then and the communicator must not be touched.
  std::optional<ncclResult_t> Finalize() {
    constexpr double kMostSeconds = 30;  // The results are there: nothing is lost by leaving early.
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return ncclUnhandledCudaError;
    std::promise<ncclResult_t> promise;
    std::future<ncclResult_t> result = promise.get_future();
    try {
      std::thread([comm = comm_, device, promise = std::move(promise)]() mutable {
        promise.set_value(cudaSetDevice(device) == cudaSuccess ? ncclCommFinalize(comm) : ncclUnhandledCudaError);
      }).detach();
    } catch (const std::system_error&) {
      return ncclSystemError;
    }
    const double seconds = std::min(kMostSeconds, options_.timeout_seconds / 2);
    if (result.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) return std::nullopt;
    return result.get();
  }

  // While the host waits for the GPU: so a dead or stalled peer does not hang this rank.
  void CheckPeers(double waited) {
    if (comm_ == nullptr) return;
    ncclResult_t state = ncclSuccess;
    Check(ncclCommGetAsyncError(comm_, &state), "collectives");
    if (state != ncclInProgress) Check(state, "collectives");
    if (waited > options_.timeout_seconds) {
      Fail(v1::REASON_COLLECTIVE_TIMEOUT, "collectives", NotWithinTime("the GPU has not finished"));
    }
  }

  std::string NotWithinTime(const char* what) const {
    const std::string late = LateRanks(), detail = ncclGetLastError(comm_);
    return fmt::format("{} within {} s: {}{}", what, options_.timeout_seconds, late.empty() ? "a peer died or stalls" : late,
                       detail.empty() ? "" : "; NCCL's last words: " + detail);
  }

  void Check(ncclResult_t result, const char* what) {
    if (result == ncclSuccess) return;
    if (result == ncclInProgress) {  // The environment outweighs the configuration.
      Fail(v1::REASON_ENGINE_ERROR, what,
           "NCCL is in its non-blocking mode; take NCCL_COMM_BLOCKING out of the environment and of nccl.conf, or set it to 1");
    }
    const std::string detail = ncclGetLastError(comm_);
    const v1::Reason reason = ReasonOfNccl(result, detail);
    Fail(reason, what,
         ncclGetErrorString(result) + (detail.empty() ? "" : ": " + detail) +
             (reason == v1::REASON_OUT_OF_MEMORY ? fmt::format(" ({})", FreeMemoryText()) : NextStepOfNccl(result, detail)));
  }

  [[noreturn]] void Fail(v1::Reason reason, const char* what, const std::string& why) {
    const std::string text = fmt::format("{} in group {}, rank {} of {}: {}", what, options_.group, rank(), size(), why);
    NoteFault(reason, text);  // Before what may hang.
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
    throw EngineError(reason, text);
  }

  NcclOptions options_;
  cudaStream_t stream_;
  ncclComm_t comm_ = nullptr;
  int watch_ = 0, twins_ = 0;
  void* staging_ = nullptr;
  size_t staged_bytes_ = 0;
};

std::unique_ptr<Communicator> Make(const NcclOptions& options) { return std::make_unique<NcclCommunicator>(options); }

const bool g_registered = (RegisterNccl(&Make), true);

}  // namespace
}  // namespace mbridge::cuda
