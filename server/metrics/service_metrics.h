// The Prometheus view of the coordinator: `/metrics` on its own port.
//
// The truth about a run's loss is the store and StreamMetrics; here stand counters and the newest values of live jobs.
// The series of a job leave with RemoveJob, so that the loss of a dead job is never scraped; at most kMaxTrainedJobs
// jobs have series at a time. Thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "mbridge/v1/checkpoint.pb.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/metric.pb.h"
#include "mbridge/v1/node.pb.h"

namespace mbridge::server {

inline constexpr int kMaxTrainedJobs = 200;

class ServiceMetrics {
 public:
  ServiceMetrics(const std::string& version, const std::string& build_id);
  ~ServiceMetrics();

  // Serves http://`address`/metrics until destruction. UNAVAILABLE PORT_IN_USE.
  absl::Status Serve(const std::string& address);
  // What a scrape returns.
  std::string Text() const;

  // --- Jobs.
  using JobCounts = std::map<std::pair<v1::JobState, v1::JobKind>, int>;
  void SetLiveJobs(const JobCounts& counts);  // Non-terminal states; a state that is left out becomes 0.
  void JobSubmitted(v1::JobKind kind);
  void JobStarted(double queue_wait_seconds);
  void JobFinished(v1::JobKind kind, v1::JobState state, v1::Reason reason);
  void AttemptRestarted(v1::Reason reason);
  void TrainPoint(const std::string& job_id, const v1::MetricPoint& point);  // NaN is exported as NaN.
  void RemoveJob(const std::string& job_id);

  // --- Checkpoints, nodes, store, API.
  void CheckpointCommitted(const v1::Checkpoint& checkpoint);
  void CheckpointFailed(v1::Reason reason);
  void SetNode(const std::string& node_id, v1::NodeState state, int gpus, int gpus_used, double report_age_seconds);
  void StoreWrite(double seconds);
  void SchedulePass(double seconds);
  void StreamOpened(const std::string& type);
  void StreamClosed(const std::string& type, int64_t dropped_progress);
  void CallStarted();
  void GrpcHandled(const std::string& method, const std::string& code);  // Ends what CallStarted began.
  int open_calls() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mbridge::server
