#include "server/metrics/service_metrics.h"

#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <mutex>
#include <set>
#include <vector>

#include "proto/rpc/status_details.h"

namespace mbridge::server {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

Family<Counter>& CounterFamily(prometheus::Registry& registry, const std::string& name, const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

Family<Gauge>& GaugeFamily(prometheus::Registry& registry, const std::string& name, const std::string& help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

Histogram& OneHistogram(prometheus::Registry& registry, const std::string& name, const std::string& help,
                        const Histogram::BucketBoundaries& buckets) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, buckets);
}

// "running" for JOB_STATE_RUNNING.
std::string Lower(const std::string& name, const std::string& prefix) {
  std::string text = name.starts_with(prefix) ? name.substr(prefix.size()) : name;
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}
std::string Label(v1::JobState state) { return Lower(v1::JobState_Name(state), "JOB_STATE_"); }
std::string Label(v1::JobKind kind) { return Lower(v1::JobKind_Name(kind), "JOB_KIND_"); }
std::string Label(v1::NodeState state) { return Lower(v1::NodeState_Name(state), "NODE_STATE_"); }
std::string Label(v1::Reason reason) { return Lower(v1::Reason_Name(reason), "REASON_"); }

constexpr std::array kLiveStates = {v1::JOB_STATE_QUEUED, v1::JOB_STATE_STARTING, v1::JOB_STATE_RUNNING, v1::JOB_STATE_STOPPING};
constexpr std::array kNodeStates = {v1::NODE_STATE_READY, v1::NODE_STATE_DRAINED, v1::NODE_STATE_UNREACHABLE,
                                    v1::NODE_STATE_LOST};

// A gauge of the newest training point, and how to read it off.
struct TrainGauge {
  const char* name;
  const char* help;
  double (*value)(const v1::MetricPoint&);
};
const TrainGauge kTrainGauges[] = {
    {"mb_train_loss", "LM loss of the newest training point of a live job", [](const v1::MetricPoint& p) { return p.lm_loss(); }},
    {"mb_train_learning_rate", "Learning rate of a live job", [](const v1::MetricPoint& p) { return p.learning_rate(); }},
    {"mb_train_grad_norm", "Gradient norm before clipping of a live job", [](const v1::MetricPoint& p) { return p.grad_norm(); }},
    {"mb_train_step", "Newest iteration of a live job", [](const v1::MetricPoint& p) { return double(p.step()); }},
    {"mb_train_step_seconds", "Seconds an iteration of a live job",
     [](const v1::MetricPoint& p) { return p.elapsed_ms_per_iteration() / 1e3; }},
    {"mb_train_tokens_per_second", "Tokens a second of a live job",
     [](const v1::MetricPoint& p) { return p.tokens_per_second(); }},
    {"mb_train_tokens", "Tokens consumed by the run of a live job",
     [](const v1::MetricPoint& p) { return double(p.consumed_tokens()); }},
    {"mb_train_skipped_steps", "Skipped iterations in the newest interval of a live job",
     [](const v1::MetricPoint& p) { return double(p.skipped_iterations()); }},
};
constexpr size_t kTrainGaugeCount = std::size(kTrainGauges);

}  // namespace

struct ServiceMetrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::unique_ptr<prometheus::Exposer> exposer;

  Family<Gauge>& jobs = GaugeFamily(*registry, "mb_jobs", "Live jobs by state");
  Family<Counter>& submitted = CounterFamily(*registry, "mb_jobs_submitted_total", "Jobs created");
  Family<Counter>& finished = CounterFamily(*registry, "mb_jobs_finished_total", "Jobs that reached a terminal state");
  Family<Counter>& restarts =
      CounterFamily(*registry, "mb_worker_restarts_total", "New attempts by the reason that ended the last one");
  Histogram& queue_wait = OneHistogram(*registry, "mb_job_queue_wait_seconds", "From submit to the first placement",
                                       {0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400});
  Family<Counter>& checkpoint_count = CounterFamily(*registry, "mb_checkpoints_committed_total", "Checkpoints committed");
  Family<Counter>& checkpoint_bytes = CounterFamily(*registry, "mb_checkpoint_bytes_total", "Bytes of committed checkpoints");
  Family<Counter>& checkpoint_failures =
      CounterFamily(*registry, "mb_checkpoint_failures_total", "Attempts that a checkpoint ended");
  Family<Gauge>& last_commit =
      GaugeFamily(*registry, "mb_checkpoint_last_commit_timestamp_seconds", "Newest commit of a live job");
  Family<Gauge>& node_state = GaugeFamily(*registry, "mb_node_state", "1 for the state that a node is in");
  Family<Gauge>& gpus = GaugeFamily(*registry, "mb_gpus", "GPUs of a node by use");
  Family<Gauge>& heartbeat_age = GaugeFamily(*registry, "mb_worker_heartbeat_age_seconds", "Since the last report of a node");
  Histogram& store_write = OneHistogram(*registry, "mb_store_write_seconds", "A synced write of the store",
                                        {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30});
  Histogram& schedule_pass =
      OneHistogram(*registry, "mb_schedule_pass_duration_seconds", "One pass of the scheduler", {0.0001, 0.001, 0.01, 0.1, 1});
  Family<Gauge>& streams = GaugeFamily(*registry, "mb_watch_streams", "Open streams");
  Family<Counter>& dropped = CounterFamily(*registry, "mb_watch_dropped_total", "Progress events left out for slow readers");
  Family<Counter>& handled = CounterFamily(*registry, "grpc_server_handled_total", "Finished calls");

  std::atomic<int> open_calls{0};
  std::mutex mutex;  // Guards the members below; a removed gauge must not be set any more.
  std::vector<Family<Gauge>*> train_families;
  struct JobGauges {
    std::array<Gauge*, kTrainGaugeCount> train{};
    Gauge* last_commit = nullptr;
  };
  std::map<std::string, JobGauges> live;

  JobGauges* Find(const std::string& job_id) {
    const auto found = live.find(job_id);
    if (found != live.end()) return &found->second;
    return live.size() < kMaxTrainedJobs ? &live[job_id] : nullptr;
  }
};

ServiceMetrics::ServiceMetrics(const std::string& version, const std::string& build_id) : impl_(std::make_unique<Impl>()) {
  GaugeFamily(*impl_->registry, "mb_build_info", "Always 1").Add({{"version", version}, {"commit", build_id}}).Set(1);
  for (const TrainGauge& gauge : kTrainGauges) {
    impl_->train_families.push_back(&GaugeFamily(*impl_->registry, gauge.name, gauge.help));
  }
  SetLiveJobs({});
  // Series with known labels exist from the start, so that rates and dashboards begin at 0.
  for (const char* type : {"JobService/WatchJob", "JobService/TailLogs", "JobService/StreamMetrics"}) {
    impl_->streams.Add({{"type", type}});
  }
  impl_->submitted.Add({{"kind", Label(v1::JOB_KIND_PRETRAIN)}});
  for (Family<Counter>* family : {&impl_->dropped, &impl_->checkpoint_count, &impl_->checkpoint_bytes}) family->Add({});
}

ServiceMetrics::~ServiceMetrics() = default;

absl::Status ServiceMetrics::Serve(const std::string& address) {
  try {
    impl_->exposer = std::make_unique<prometheus::Exposer>(address);
    impl_->exposer->RegisterCollectable(impl_->registry);
  } catch (const std::exception& error) {
    return MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_PORT_IN_USE,
                      fmt::format("cannot serve metrics on {} ({}); stop the process that uses the address, choose another "
                                  "--metrics-listen, or turn metrics off with --metrics-listen none",
                                  address, error.what()));
  }
  return absl::OkStatus();
}

std::string ServiceMetrics::Text() const { return prometheus::TextSerializer().Serialize(impl_->registry->Collect()); }

void ServiceMetrics::SetLiveJobs(const JobCounts& counts) {
  const auto set = [&](v1::JobState state, v1::JobKind kind) {
    const auto found = counts.find({state, kind});
    impl_->jobs.Add({{"state", Label(state)}, {"kind", Label(kind)}}).Set(found == counts.end() ? 0 : found->second);
  };
  for (const v1::JobState state : kLiveStates) set(state, v1::JOB_KIND_PRETRAIN);
}

void ServiceMetrics::JobSubmitted(v1::JobKind kind) { impl_->submitted.Add({{"kind", Label(kind)}}).Increment(); }
void ServiceMetrics::JobStarted(double queue_wait_seconds) { impl_->queue_wait.Observe(queue_wait_seconds); }

void ServiceMetrics::JobFinished(v1::JobKind kind, v1::JobState state, v1::Reason reason) {
  impl_->finished.Add({{"kind", Label(kind)}, {"result", Label(state)}, {"reason", Label(reason)}}).Increment();
}

void ServiceMetrics::AttemptRestarted(v1::Reason reason) { impl_->restarts.Add({{"reason", Label(reason)}}).Increment(); }

void ServiceMetrics::TrainPoint(const std::string& job_id, const v1::MetricPoint& point) {
  if (point.kind() != v1::METRIC_KIND_TRAIN) return;
  std::lock_guard lock(impl_->mutex);
  Impl::JobGauges* gauges = impl_->Find(job_id);
  if (gauges == nullptr) return;
  for (size_t i = 0; i < kTrainGaugeCount; ++i) {
    if (gauges->train[i] == nullptr) gauges->train[i] = &impl_->train_families[i]->Add({{"job", job_id}});
    gauges->train[i]->Set(kTrainGauges[i].value(point));
  }
}

void ServiceMetrics::RemoveJob(const std::string& job_id) {
  std::lock_guard lock(impl_->mutex);
  const auto found = impl_->live.find(job_id);
  if (found == impl_->live.end()) return;
  for (size_t i = 0; i < kTrainGaugeCount; ++i) {
    if (found->second.train[i] != nullptr) impl_->train_families[i]->Remove(found->second.train[i]);
  }
  if (found->second.last_commit != nullptr) impl_->last_commit.Remove(found->second.last_commit);
  impl_->live.erase(found);
}

void ServiceMetrics::CheckpointCommitted(const v1::Checkpoint& checkpoint) {
  impl_->checkpoint_count.Add({}).Increment();
  impl_->checkpoint_bytes.Add({}).Increment(static_cast<double>(checkpoint.bytes()));
  std::lock_guard lock(impl_->mutex);
  Impl::JobGauges* gauges = impl_->Find(checkpoint.job_id());
  if (gauges == nullptr) return;
  if (gauges->last_commit == nullptr) gauges->last_commit = &impl_->last_commit.Add({{"job", checkpoint.job_id()}});
  gauges->last_commit->Set(static_cast<double>(checkpoint.commit_time().seconds()));
}

void ServiceMetrics::CheckpointFailed(v1::Reason reason) {
  impl_->checkpoint_failures.Add({{"reason", Label(reason)}}).Increment();
}

void ServiceMetrics::SetNode(const std::string& node_id, v1::NodeState state, int gpus, int gpus_used,
                             double report_age_seconds) {
  for (const v1::NodeState each : kNodeStates) {
    impl_->node_state.Add({{"node", node_id}, {"state", Label(each)}}).Set(each == state ? 1 : 0);
  }
  impl_->gpus.Add({{"node", node_id}, {"state", "used"}}).Set(gpus_used);
  impl_->gpus.Add({{"node", node_id}, {"state", "free"}}).Set(gpus - gpus_used);
  impl_->heartbeat_age.Add({{"node", node_id}}).Set(report_age_seconds);
}

void ServiceMetrics::StoreWrite(double seconds) { impl_->store_write.Observe(seconds); }
void ServiceMetrics::SchedulePass(double seconds) { impl_->schedule_pass.Observe(seconds); }
void ServiceMetrics::StreamOpened(const std::string& type) { impl_->streams.Add({{"type", type}}).Increment(); }

void ServiceMetrics::StreamClosed(const std::string& type, int64_t dropped_progress) {
  impl_->streams.Add({{"type", type}}).Decrement();
  if (dropped_progress > 0) impl_->dropped.Add({}).Increment(static_cast<double>(dropped_progress));
}

void ServiceMetrics::CallStarted() { ++impl_->open_calls; }
int ServiceMetrics::open_calls() const { return impl_->open_calls; }

void ServiceMetrics::GrpcHandled(const std::string& method, const std::string& code) {
  --impl_->open_calls;
  impl_->handled.Add({{"method", method}, {"code", code}}).Increment();
}

}  // namespace mbridge::server
