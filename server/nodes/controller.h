// The state machine of jobs and nodes: what should run where, and what the reports of the agents mean.
//
// Level-triggered: Sync() takes what a node reports and answers what should exist there; calling it twice changes
// nothing. Each transition is committed to the store before memory changes and before anybody hears of it, so that a
// restarted coordinator stands where the old one stood: running attempts are adopted again when their agents report.
// Only live jobs are in memory. Terminal states never change.
//
// Thread-safe. Listener and task callbacks are called without a lock held; they may call back.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mbridge/v1/agent_service.pb.h"
#include "mbridge/v1/checkpoint.pb.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/node.pb.h"
#include "server/nodes/clock.h"
#include "server/nodes/log_archive.h"
#include "server/store/store.h"

namespace mbridge::server {

class ServiceMetrics;

class Controller {
 public:
  struct Options {
    std::string log_directory;
    std::string instance_id;  // New at every start.
    std::string build_id;
    std::chrono::milliseconds unreachable_after{10'000};
    std::chrono::milliseconds lost_after{300'000};
    std::chrono::milliseconds cancel_grace{120'000};  // From a graceful stop to the kill.
    // From one rank's bad end to the kill of the others; the longer one while only symptoms were seen.
    std::chrono::milliseconds cause_grace{3'000};
    std::chrono::milliseconds symptom_grace{10'000};
    Clock clock;
  };
  // Something changed: a job (events, metrics, logs or progress) or what a node should do.
  struct Notice {
    std::string job_id;
    std::string node_id;
    std::optional<v1::MetricPoint> progress;
  };
  using Listener = std::function<void(const Notice&)>;
  using TaskCallback = std::function<void(absl::StatusOr<v1::TaskResult>)>;

  // `store` and `metrics` outlive the controller.
  static absl::StatusOr<std::unique_ptr<Controller>> Create(Options options, Store* store, ServiceMetrics* metrics);
  ~Controller();
  void SetListener(Listener listener);  // Before the first call of anything else.

  // --- Jobs.
  struct StartPoint {
    std::string checkpoint_id;              // "": from the seed.
    std::optional<v1::Checkpoint> corrupt;  // Newer than the one of a resume without an id, and left out.
  };
  // The checkpoint that the start mode means. FAILED_PRECONDITION RUN_HAS_CHECKPOINTS or RUN_IN_USE, NOT_FOUND
  // CHECKPOINT_NOT_FOUND, DATA_LOSS CHECKPOINT_CORRUPT.
  absl::StatusOr<StartPoint> CheckStart(const v1::StartSpec& start, const std::string& run_name) const;
  // `job` has id, spec, run name and directory, and the resolved config; start is checked again. Durable on return.
  absl::StatusOr<v1::Job> AddJob(v1::Job job, std::optional<IdempotencyRecord> idempotency);
  absl::StatusOr<v1::Job> GetJob(const std::string& job_id) const;
  void Overlay(v1::Job* stored) const;  // Replaces a job as stored by the live one, if it is live.
  // Idempotent. `why`: CANCELLED_BY_USER, KILLED_BY_USER, SHUTDOWN. FAILED_PRECONDITION JOB_FINISHED.
  absl::StatusOr<v1::Job> StopJob(const std::string& job_id, bool kill, v1::Reason why);
  std::vector<std::string> LiveJobs() const;
  void RefuseNewJobs();  // SERVICE_STOPPING from now on.

  // --- Nodes.
  struct SyncAnswer {
    v1::SyncResponse response;
    bool may_wait = false;  // Nothing was delivered and nothing is new: the call may be held back until a notice.
  };
  absl::StatusOr<SyncAnswer> Sync(const v1::SyncRequest& request);
  v1::SyncResponse Orders(const std::string& node_id) const;  // What Sync would answer now.
  std::vector<v1::Node> ListNodes() const;
  absl::StatusOr<v1::Node> DrainNode(const std::string& node_id, bool drain, const std::string& reason);
  // "" where the connected nodes, idle, can hold the job or none is connected; else why not.
  std::string WhyNeverFits(int ranks, v1::Device device) const;
  // GPUs of all nodes that take jobs, busy or not.
  int Gpus() const;
  // The largest reachable node for the device, for a job's preflight; nullopt where there is none.
  std::optional<v1::Node> PreflightNode(v1::Device device) const;
  // Calls back once, with the result, DEADLINE_EXCEEDED, or UNAVAILABLE where the node is not reachable.
  void RunTask(const std::string& node_id, v1::NodeTask task, std::chrono::milliseconds timeout, TaskCallback callback);
  void AbandonTasks();  // Calls every callback back with UNAVAILABLE SERVICE_STOPPING.

  // --- Checkpoints.
  absl::StatusOr<v1::Checkpoint> PinCheckpoint(const std::string& id, bool pinned, const std::string& etag);
  absl::StatusOr<v1::Checkpoint> DeleteCheckpoint(const std::string& id, bool force);
  // Marks it as corrupt; the text names the usable ones of its run, for a message.
  std::string RecordCorruption(const std::string& id, const std::string& detail);
  absl::StatusOr<v1::Checkpoint> RecordVerification(const std::string& id, const v1::TaskResult& result);

  // Deadlines, lost nodes, placement, gauges. To be called several times a second.
  void Tick();

  const LogArchive& logs() const;

  struct State;  // controller_state.h

 private:
  explicit Controller(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

bool IsTerminal(v1::JobState state);

}  // namespace mbridge::server
