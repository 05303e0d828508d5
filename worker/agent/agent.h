// The node agent without its connection: reports in, orders out, supervision in between.
//
// Keeps nothing in memory that matters: attempts live in <state>/attempts, the node's name in <state>/node_id. A killed
// agent goes on where it was; ranks do not notice.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "mbridge/v1/agent_service.pb.h"
#include "worker/agent/attempt.h"
#include "worker/agent/node_tasks.h"

namespace mbridge::agent {

struct AgentOptions {
  std::string state_directory;
  Programs programs;
  TaskLimits task_limits;
  v1::NodeInventory inventory;
};

// Not thread-safe.
class Agent {
 public:
  // Takes the lock (FAILED_PRECONDITION while another agent has it; the message has its pid) and loads the attempts.
  static absl::StatusOr<std::unique_ptr<Agent>> Open(const AgentOptions& options);
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  const std::string& node_id() const { return node_id_; }
  // One round of supervision; every 100 ms or so.
  void Tick(TimePoint now);
  v1::SyncRequest BuildRequest();
  // The answer to the last request.
  void Apply(const v1::SyncResponse& response, TimePoint now);

  // Ends every rank: SIGTERM now, SIGKILL 20 s later.
  void BeginShutdown(TimePoint now);
  // Shutdown is over: all ranks ended and their ends were reported, or nobody has listened for 5 s.
  bool finished(TimePoint now) const;

 private:
  using Key = std::pair<std::string, int>;  // Job id, attempt.

  Agent(const AgentOptions& options, int lock);
  absl::Status LoadNodeId();
  void LoadAttempts();
  void RetryUnreadable(TimePoint now);
  void ApplyOrder(const v1::AttemptOrder& order);
  void StartAttempt(const v1::AttemptOrder& order);
  bool OlderAttemptLives(const v1::AttemptOrder& order);
  void ReportFailedStart(const v1::AttemptOrder& order, const absl::Status& status);
  void Forget(const Key& key);
  std::string DirectoryOf(const Key& key) const;
  bool AllEnded() const;

  const AgentOptions options_;
  const int lock_;
  std::string node_id_;
  std::string instance_;
  std::string coordinator_instance_;
  std::string seen_version_;
  Children children_;
  NodeTasks tasks_;
  std::map<Key, std::unique_ptr<Attempt>> attempts_;
  // Attempts whose files the disk does not give: kept, reported as running, and tried again.
  std::map<Key, bool> unreadable_;  // True: to be ended, readable or not.
  TimePoint unreadable_tried_at_{};
  std::map<Key, v1::AttemptReport> failed_starts_;  // Attempts without a directory; reported until forgotten.
  std::string shutdown_task_;
  std::optional<TimePoint> shutdown_at_;
  std::optional<TimePoint> ended_at_;  // During a shutdown.
  bool ends_reported_ = false;
  bool request_had_ends_ = false;  // And all else.
};

}  // namespace mbridge::agent
