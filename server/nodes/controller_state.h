// Private to server/nodes: what the controller holds in memory, and its steps. All under one mutex.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "server/metrics/service_metrics.h"
#include "server/nodes/controller.h"
#include "server/nodes/verdict.h"

namespace mbridge::server {

// An attempt's share on one node.
struct NodePart {
  bool reported = false;                                  // The agent has said that it knows the attempt.
  bool drained = false;                                   // Every rank ended and everything was delivered.
  v1::DesiredState told = v1::DESIRED_STATE_UNSPECIFIED;  // The last order given.
};

struct LiveJob {
  v1::Job job;  // As stored, without resolved.values.
  Monotonic queued_since;
  Monotonic not_before;              // End of the back-off.
  std::optional<Monotonic> started;  // First attempt, for the wall-time limit.
  std::optional<Monotonic> kill_at;  // End of the grace of a stop.
  // Of the current attempt:
  std::map<std::string, NodePart> parts;  // By node.
  uint64_t acknowledged = 0;              // Records stored.
  std::optional<Monotonic> bad_end;       // First bad end of a rank.
  bool only_symptoms = false;             // No root cause among the bad ends yet.
  std::set<int> killed_by_us;
  struct Rendezvous {
    std::string node_id, value;
  };
  std::map<std::string, Rendezvous> rendezvous;  // By key.
};

struct PendingTask {
  v1::NodeTask task;
  Controller::TaskCallback callback;  // Null for outbox work.
  std::optional<Monotonic> deadline;
  Monotonic not_before;  // A failed deletion is tried again later.
};

struct NodeEntry {
  v1::Node node;  // state, inventory, drain_reason.
  Monotonic last_report;
  bool drained = false;
  struct Reported {
    std::string job_id;
    int32_t attempt = 0;
    bool ended = false, drained = false;
    std::set<int> ranks;
  };
  std::vector<Reported> reported;  // By the last Sync.
  std::map<std::string, PendingTask> tasks;
};

// A transition of one job, built on a copy and applied when the store has it.
struct Change {
  LiveJob* live = nullptr;
  v1::Job job;
  Transition transition;
  std::optional<Verdict> ended;  // The current attempt is over.
  std::vector<v1::Checkpoint> committed;
  std::optional<v1::MetricPoint> progress;
};

struct Controller::State {
  Options options;
  Store* store;
  ServiceMetrics* metrics;
  LogArchive logs;
  Listener listener;

  mutable std::mutex mutex;
  std::map<std::string, LiveJob> live;
  std::map<std::string, NodeEntry> nodes;
  bool schedule_dirty = true;
  bool refuse_jobs = false;
  Monotonic last_tick;
  Monotonic last_gauges;
  // Handed out when the lock is released (Section).
  std::vector<Notice> notices;
  std::vector<std::function<void()>> callbacks;

  State(Options options, Store* store, ServiceMetrics* metrics);
  Monotonic Now() const { return options.clock.now(); }
  google::protobuf::Timestamp WallNow() const { return ToTimestamp(options.clock.wall()); }
  // How long ago, by the wall clock; never negative.
  Monotonic MonotonicOf(const google::protobuf::Timestamp& time) const;

  // controller.cc
  absl::Status Load();
  void NotifyJob(const std::string& job_id, std::optional<v1::MetricPoint> progress = std::nullopt);
  void NotifyNodesOf(const LiveJob& job);
  Change Begin(LiveJob& job) const;
  void SetState(Change* change, v1::JobState state, v1::Reason reason, const std::string& detail) const;
  void AddEvent(Change* change, v1::EventKind kind, const std::string& detail, const std::string& checkpoint_id = "") const;
  void EndAttempt(Change* change, Cause cause) const;  // Sets `ended` and the job's next state.
  absl::Status Apply(Change change);                   // Commits; `live` may be gone afterwards.
  absl::StatusOr<Controller::StartPoint> CheckStart(const v1::StartSpec& start, const std::string& run_name) const;
  absl::Status Stop(LiveJob& job, bool kill, v1::Reason why, const std::string& detail);

  // reports.cc
  void ApplyReport(LiveJob& job, const std::string& node_id, const v1::AttemptReport& report);
  void ApplyRecords(Change* change, const std::string& node_id, const v1::AttemptReport& report) const;
  void ApplyRankEnds(Change* change, const v1::AttemptReport& report);
  void KeepLateReport(const std::string& node_id, const v1::AttemptReport& report);
  void MissingFromReport(LiveJob& job, const std::string& node_id);
  void ArchiveLogs(const v1::AttemptReport& report) const;
  void TakeResults(NodeEntry& node, const v1::SyncRequest& request, v1::SyncResponse* response);
  v1::SyncResponse OrdersFor(const NodeEntry& node) const;
  v1::AttemptOrder OrderFor(const LiveJob& job, const std::string& node_id) const;
  v1::AttemptOrder OrderForStale(const NodeEntry::Reported& reported) const;
  v1::DesiredState DesiredFor(const LiveJob& job) const;

  // placement.cc
  void SchedulePass();
  void Place(LiveJob& job, const struct Placement& placement);
  std::vector<struct NodeSlots> Slots() const;
  int Gpus() const;
  absl::StatusOr<std::optional<v1::Checkpoint>> SourceOf(const v1::Job& job) const;
  std::vector<v1::RankSpec> SpecsFor(const LiveJob& job, const std::string& node_id) const;
  void CheckNodes();
  void CheckJobs();
  void CheckTasks();
  void UpdateGauges() const;
  v1::Node Describe(const NodeEntry& node) const;

  // checkpoints.cc
  void CommitCheckpoint(const v1::Job& job, int32_t attempt, const std::string& node_id, v1::Checkpoint checkpoint,
                        Transition* transition, std::vector<v1::Checkpoint>* committed) const;
  void ApplyRetention(const v1::Job& job);
  std::string MarkCorrupt(const std::string& checkpoint_id, const std::string& detail, Transition* transition) const;
  absl::Status StartDeletion(std::vector<v1::Checkpoint> checkpoints);
  void FinishDeletion(NodeEntry& node, const v1::NodeTask& task, const v1::TaskResult& result);
  std::string UserOf(const std::string& checkpoint_id) const;  // A live job that starts from it, or "".
};

// Holds the lock; at its end releases it and delivers what became due.
class Section {
 public:
  explicit Section(Controller::State& state);
  ~Section();

 private:
  Controller::State& state_;
  std::unique_lock<std::mutex> lock_;
};

// The attempt that has not ended, or null.
const v1::Attempt* CurrentAttempt(const v1::Job& job);
v1::Attempt* CurrentAttempt(v1::Job& job);

}  // namespace mbridge::server
