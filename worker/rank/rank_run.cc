#include "worker/rank/rank_run.h"

#include <google/protobuf/text_format.h>
#include <omp.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "engine/comm/nccl.h"
#include "engine/core/device.h"
#include "engine/core/failpoint.h"
#include "engine/core/watchdog.h"
#include "engine/train/throw_status.h"
#include "engine/train/trainer.h"
#include "mbridge/v1/config.pb.h"
#include "proto/format/memory_table.h"
#include "proto/rpc/version.h"
#include "recipes/config/resolve.h"
#include "worker/rank/convert_command.h"
#include "worker/rank/spool_sink.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/file.h"

namespace mbridge {
namespace {

std::atomic<bool> g_stop{false};

void OnTerminate(int) { g_stop.store(true); }

using EndRank = std::function<void(const v1::RankResult&)>;

// The training of one spec; rank 0 reports to the spool.
v1::RankResult Train(const v1::RankSpec& spec, EventSink* sink, const EndRank& end) {
  TrainingPlan plan = ValueOrThrow(MakeTrainingPlan(spec.resolved()));
  plan.device = spec.device() == v1::DEVICE_CUDA ? DeviceType::kCuda : DeviceType::kCpu;
  const spool::AttemptDirectory directory(spec.attempt_directory());
  const Context context = MakeRankContext(spec, plan);
  return RunTraining(spec, plan, context, directory.RendezvousPath(), sink, end);
}

double WatchdogSeconds(const TrainingPlan& plan) {
  const char* const text = std::getenv("MB_WATCHDOG_SECONDS");
  const double seconds = text == nullptr ? 0 : std::strtod(text, nullptr);
  return seconds > 0 ? seconds : plan.collective_timeout_seconds;
}

// Null where there are no peers.
std::unique_ptr<Watchdog> StartWatchdog(const v1::RankSpec& spec, double seconds, const EndRank& end) {
  if (spec.world_size() <= 1) return nullptr;
  WatchdogOptions options;
  options.timeout_seconds = seconds;
  options.grace_seconds = std::min(seconds, 10.0);
  options.rank = spec.rank();
  options.size = spec.world_size();
  if (!spec.attempt_directory().empty()) options.pulse_path = spool::AttemptDirectory(spec.attempt_directory()).PulsePath();
  options.end = [end](v1::Reason reason, const std::string& detail) {
    v1::RankResult result;
    result.set_reason(reason);
    result.set_detail(detail);
    end(result);
  };
  return std::make_unique<Watchdog>(std::move(options));
}

// What to do where GPU memory was missing although the plan of `planned` bytes fitted into the `available` ones of the start (0:
// not known): plan or neighbours differ from what was known.
std::string AfterOutOfGpuMemory(const v1::RankSpec& spec, const TrainingPlan& plan, int64_t planned, int64_t available) {
  if (available == 0) return "end what else uses this GPU (nvidia-smi lists it)";
  std::string text = fmt::format(
      "{} MiB were there at the start. End what else uses this GPU (nvidia-smi lists it), or take a layout that needs less:",
      available >> 20);
  const int64_t less = std::min(planned, available) / 10 * 9;
  for (const std::string& line : LayoutsThatFit(spec.resolved(), LayoutResolverOf(spec), plan.device, {less, spec.gpus()}))
    text += "\n  " + line;
  return text;
}

// f(); what it throws for want of memory also names the plan and what to do. `available` as above.
template <class F>
auto NamingThePlan(const v1::RankSpec& spec, const TrainingPlan& plan, const v1::MemoryEstimate& memory, int64_t available,
                   F&& f) {
  const auto extended = [&](const std::string& what, bool gpu) {
    const std::string next = gpu ? AfterOutOfGpuMemory(spec, plan, TotalBytes(memory), available)
                                 : "lower train.micro_batch_size, or run fewer ranks on this node";
    return EngineError(v1::REASON_OUT_OF_MEMORY,
                       fmt::format("{}; planned for this rank: {}; {}", what, MemoryLine(memory), next));
  };
  try {
    return f();
  } catch (const EngineError& error) {
    if (error.reason() != v1::REASON_OUT_OF_MEMORY) throw;
    throw extended(error.what(), plan.device != DeviceType::kCpu);
  } catch (const std::bad_alloc&) {
    throw extended("an allocation of host memory failed", false);
  }
}

std::unique_ptr<SpoolSink> MakeSpoolSink(const v1::RankSpec& spec, const std::string& path) {
  const bool log_throughput = spec.resolved().config().logger().log_throughput();
  return std::make_unique<SpoolSink>(ValueOrThrow(spool::RecordWriter::Open(path)), log_throughput);
}

// Tells log, spool and agent how the rank ended; returns the exit code.
int WriteEnd(const v1::RankSpec& spec, const spool::AttemptDirectory& directory, const v1::RankResult& result, SpoolSink* sink) {
  if (result.reason() != v1::REASON_COMPLETED) {
    std::fprintf(stderr, "rank %d ends: %s: %s\n", spec.rank(), ReasonName(result.reason()).c_str(), result.detail().c_str());
  }
  if (sink != nullptr) sink->Finished(result);
  if (const absl::Status status = spool::WriteProto(directory.ResultPath(spec.rank()), result); !status.ok()) {
    std::fprintf(stderr, "mbrank: %s\n", std::string(status.message()).c_str());
    return ExitCodeOf(v1::REASON_ENGINE_ERROR);
  }
  return ExitCodeOf(result.reason());
}

}  // namespace

const std::atomic<bool>* InstallStopHandler() {
  struct sigaction action {};
  action.sa_handler = OnTerminate;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  return &g_stop;
}

int ExitCodeOf(v1::Reason reason) {
  if (reason == v1::REASON_COMPLETED) return 0;
  const int code = InfoOf(reason).exit_code();
  return code == 0 ? 1 : code;
}

v1::RankResult ResultOf(const std::function<v1::RankResult()>& body) {
  v1::RankResult result;
  try {
    return body();
  } catch (const EngineError& error) {
    result.set_reason(error.reason());
    result.set_detail(error.what());
  } catch (const std::bad_alloc&) {
    result.set_reason(v1::REASON_OUT_OF_MEMORY);
    result.set_detail("an allocation failed");
  } catch (const std::exception& error) {
    result.set_reason(v1::REASON_ENGINE_ERROR);
    result.set_detail(error.what());
  }
  return result;
}

RunIdentity MakeRunIdentity(const v1::RankSpec& spec) {
  RunIdentity identity;
  identity.job_id = spec.job_id();
  identity.run_name = spec.run_name();
  identity.build_id = BuildId();
  identity.attempt = spec.attempt();
  identity.checkpoint_directory = spec.checkpoint_directory();
  identity.load_checkpoint_path = spec.load_checkpoint_path();
  identity.load_weights_only = spec.load_weights_only();
  identity.expected_manifest_hash = spec.expected_manifest_hash();
  google::protobuf::TextFormat::PrintToString(spec.resolved().config(), &identity.config_text);
  identity.config_hash = spec.resolved().config_hash();
  return identity;
}

LayoutResolver LayoutResolverOf(const v1::RankSpec& spec) {
  return [&spec](const std::vector<std::string>& overrides, int ranks) {
    return recipes::ResolveAgain(spec.resolved(), overrides, ranks);
  };
}

v1::RankResult RunTraining(const v1::RankSpec& spec, const TrainingPlan& plan, const Context& context,
                           const std::string& rendezvous, EventSink* sink, const EndRank& end) {
  Device& device = DeviceOf(plan.device);
  const v1::MemoryEstimate memory = PlanMemory(plan);
  const auto say = [&](const std::string& text) {
    if (sink != nullptr) return sink->Message(text);
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  };
  say(MemoryTable(fmt::format("memory of rank {}, as planned", spec.rank()), memory));
  const Device::Memory before = device.MemoryNow();
  // What CUDA and the operators' workspace took is planned too.
  const int64_t available =
      std::min(before.total_bytes, before.free_bytes + memory.runtime_bytes() + static_cast<int64_t>(kOperatorWorkspaceBytes));
  // A test that lets memory.check fail meets the real end of the memory.
  if (before.total_bytes > 0 && MB_FAILPOINT("memory.check") == 0) {
    if (const std::string why = WhyTooLarge(spec.resolved(), LayoutResolverOf(spec), plan, {available, spec.gpus()});
        !why.empty())
      throw EngineError(v1::REASON_OUT_OF_MEMORY, why);
  }
  const RunIdentity identity = MakeRunIdentity(spec);
  const double seconds = WatchdogSeconds(plan);
  const auto watchdog = StartWatchdog(spec, seconds, end);
  return NamingThePlan(spec, plan, memory, available, [&] {
    const auto world = MakeWorld(context, rendezvous, spec.rank(), spec.world_size(), seconds);
    Trainer trainer(plan, context, identity, world.get(), sink, InstallStopHandler());
    v1::RankResult result = NotingFaults([&] { return trainer.Run(); });
    if (const Device::Memory now = device.MemoryNow(); now.total_bytes > 0) {
      const int64_t used = now.total_bytes - now.free_bytes, planned = TotalBytes(memory);
      result.set_device_bytes_in_use(used);
      say(fmt::format("memory of rank {}: {} MiB of the GPU's {} are in use at the end, {} planned ({:+.1f} %)", spec.rank(),
                      used >> 20, now.total_bytes >> 20, planned >> 20,
                      100.0 * static_cast<double>(planned - used) / static_cast<double>(used)));
    }
    return result;
  });
}

Context MakeRankContext(const v1::RankSpec& spec, const TrainingPlan& plan) {
  return NamingThePlan(spec, plan, PlanMemory(plan), 0,
                       [&] { return DeviceOf(plan.device).MakeContext(kOperatorWorkspaceBytes); });
}

std::unique_ptr<Communicator> MakeWorld(const Context& context, const std::string& directory, int rank, int size,
                                        double timeout_seconds) {
  if (size == 1) return MakeSelfCommunicator();
  if (context.device == DeviceType::kCuda) {
    NcclOptions options;
    options.directory = directory;
    options.group = "world";
    options.rank = rank;
    options.size = size;
    options.timeout_seconds = timeout_seconds;
    options.context = context;
    return MakeNcclCommunicator(options);
  }
  GlooOptions options;
  options.directory = directory;
  options.group = "world";
  options.rank = rank;
  options.size = size;
  options.timeout_seconds = timeout_seconds;
  return MakeGlooCommunicator(options);
}

int RunRank(const std::string& spec_path, const ExitProcess& exit) {
  InstallStopHandler();
  v1::RankSpec spec;
  if (const absl::Status status = spool::ReadProto(spec_path, &spec); !status.ok()) {
    std::fprintf(stderr, "mbrank: %s\n", std::string(status.message()).c_str());
    return ExitCodeOf(v1::REASON_SPAWN_FAILED);
  }
  if (spec.threads() > 0) omp_set_num_threads(spec.threads());
  const spool::AttemptDirectory directory(spec.attempt_directory());
  std::unique_ptr<SpoolSink> sink;
  const auto end = [&](const v1::RankResult& result) { exit(WriteEnd(spec, directory, result, sink.get())); };
  const v1::RankResult result = ResultOf([&] {
    if (spec.rank() == 0) sink = MakeSpoolSink(spec, directory.SpoolPath());
    return spec.has_convert() ? RunConversion(spec, sink.get(), &g_stop) : Train(spec, sink.get(), end);
  });
  return WriteEnd(spec, directory, result, sink.get());
}

}  // namespace mbridge
