#include "worker/rank/standalone.h"

#include <google/protobuf/util/json_util.h>
#include <omp.h>

#include <cstdio>
#include <fstream>
#include <mutex>

#include "engine/core/device.h"
#include "engine/train/memory_plan.h"
#include "engine/train/operator_profile.h"
#include "engine/train/throw_status.h"
#include "engine/train/trainer.h"
#include "mbridge/v1/config.pb.h"
#include "proto/format/training_line.h"
#include "recipes/config/resolve.h"
#include "worker/rank/rank_run.h"
#include "worker/spool/file.h"

namespace mbridge {
namespace {

// A file of messages as JSON lines, each there for readers as soon as it is added; none without Open. Thread-safe: the end may
// come from a watchdog.
class JsonLines {
 public:
  // Throws EngineError. An empty path opens nothing.
  void Open(const std::string& path) {
    if (path.empty()) return;
    file_.open(path);
    if (!file_) throw EngineError(v1::REASON_ENGINE_ERROR, fmt::format("cannot write {}", path));
  }
  void Add(const google::protobuf::Message& message) {
    const std::lock_guard lock(mutex_);
    std::string json;
    if (file_.is_open() && google::protobuf::util::MessageToJsonString(message, &json).ok()) file_ << json << std::endl;
  }

 private:
  std::mutex mutex_;
  std::ofstream file_;
};

// Events on the terminal and in `events`, metric points also in a file of their own.
class TerminalSink : public EventSink {
 public:
  // `profile`: told of the iterations; may be null.
  TerminalSink(const std::string& metrics_path, JsonLines* events, bool log_throughput, OperatorProfile* profile)
      : log_throughput_(log_throughput), profile_(profile), events_(events) {
    metrics_.Open(metrics_path);
  }

  void Started(const v1::RankStarted& started) override {
    std::printf("training starts after iteration %ld, %ld parameters\n", static_cast<long>(started.first_step()),
                static_cast<long>(started.parameters()));
    v1::RankRecord record;
    *record.mutable_started() = started;
    events_->Add(record);
  }
  void Metric(const v1::MetricPoint& point) override {
    std::printf("%s\n", FormatPoint(point, {.throughput = log_throughput_}).c_str());
    std::fflush(stdout);
    if (profile_ != nullptr && point.kind() == v1::METRIC_KIND_TRAIN) profile_->NextIteration();
    metrics_.Add(point);
    v1::RankRecord record;
    *record.mutable_metric() = point;
    events_->Add(record);
  }
  void CheckpointWritten(const v1::Checkpoint& checkpoint) override {
    std::printf("checkpoint of iteration %ld written to %s\n", static_cast<long>(checkpoint.step()), checkpoint.path().c_str());
    std::fflush(stdout);  // A watchdog's end skips what exit() would do.
    v1::RankRecord record;
    *record.mutable_checkpoint() = checkpoint;
    events_->Add(record);
  }
  void Message(const std::string& text) override {
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
    v1::RankRecord record;
    record.set_message(text);
    events_->Add(record);
  }

 private:
  const bool log_throughput_;
  OperatorProfile* const profile_;
  JsonLines* const events_;
  JsonLines metrics_;
};

int SayEnd(const v1::RankResult& result, JsonLines* events) {
  v1::RankRecord record;
  *record.mutable_finished() = result;
  events->Add(record);
  if (result.reason() != v1::REASON_COMPLETED) {
    std::fprintf(stderr, "mbrank: %s: %s\n", ReasonName(result.reason()).c_str(), result.detail().c_str());
  }
  return ExitCodeOf(result.reason());
}

v1::RankResult Train(const StandaloneOptions& options, JsonLines* events, const ExitProcess& exit) {
  events->Open(options.events_path);
  recipes::ResolveRequest request;
  request.recipe = options.recipe;
  if (!options.config_path.empty()) request.config_yaml = ValueOrThrow(spool::ReadFile(options.config_path));
  request.overrides = options.overrides;
  request.ranks = options.ranks;
  const bool cuda = options.device == "cuda" || (options.device == "auto" && HasDevice(DeviceType::kCuda));
  request.device = cuda ? v1::DEVICE_CUDA : v1::DEVICE_CPU;
  const v1::ResolvedConfig resolved = ValueOrThrow(recipes::Resolve(request));
  v1::RankSpec spec;
  spec.set_run_name("standalone");
  spec.set_attempt(1);
  spec.set_rank(options.rank);
  spec.set_world_size(options.ranks);
  *spec.mutable_resolved() = resolved;
  spec.set_checkpoint_directory(options.checkpoint_directory);
  spec.set_load_checkpoint_path(options.load_checkpoint_path);
  spec.set_load_weights_only(options.load_weights_only);

  TrainingPlan plan = ValueOrThrow(MakeTrainingPlan(resolved));
  plan.device = cuda ? DeviceType::kCuda : DeviceType::kCpu;
  std::unique_ptr<TerminalSink> sink;
  std::unique_ptr<OperatorProfile> profile;
  const Context context = MakeRankContext(spec, plan);
  if (options.rank == 0) {
    if (options.profile_operators) profile = std::make_unique<OperatorProfile>(context, MeasureLimits(context));
    sink =
        std::make_unique<TerminalSink>(options.metrics_path, events, resolved.config().logger().log_throughput(), profile.get());
  }
  const v1::RankResult result = RunTraining(spec, plan, context, options.rendezvous_directory, sink.get(),
                                            [&exit, events](const v1::RankResult& end) { exit(SayEnd(end, events)); });
  if (profile != nullptr) std::printf("%s", profile->Table().c_str());
  return result;
}

}  // namespace

int RunStandalone(const StandaloneOptions& options, const ExitProcess& exit) {
  omp_set_num_threads(options.threads > 0 ? options.threads : std::max(1, omp_get_num_procs() / options.ranks));
  JsonLines events;
  return SayEnd(ResultOf([&] { return Train(options, &events, exit); }), &events);
}

}  // namespace mbridge
