// One-off work for the coordinator: preflight and verify (as child processes), removal of checkpoints (on a thread).
//
// A result is kept and sent with every Sync until the coordinator has acknowledged it; a task that is known is not
// started again. ShutdownTask is the agent's own.
#pragma once

#include <chrono>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "mbridge/v1/agent_service.pb.h"
#include "worker/agent/attempt.h"
#include "worker/agent/children.h"

namespace mbridge::agent {

struct TaskLimits {
  std::chrono::milliseconds preflight = std::chrono::minutes(2);
  std::chrono::milliseconds verify = std::chrono::minutes(60);
};

// Not thread-safe.
class NodeTasks {
 public:
  // `directory` holds the files of running tasks and is emptied.
  NodeTasks(std::string directory, const Programs& programs, TaskLimits limits);
  // Ends running processes: whoever asked will ask again. Waits for removals.
  ~NodeTasks();
  NodeTasks(const NodeTasks&) = delete;
  NodeTasks& operator=(const NodeTasks&) = delete;

  void Add(const v1::NodeTask& task, TimePoint now, Children* children);
  void Tick(TimePoint now, Children* children);
  void Acknowledge(const std::string& task_id) { results_.erase(task_id); }
  void FillResults(v1::SyncRequest* request) const;
  bool running() const { return !processes_.empty() || !removals_.empty(); }

 private:
  struct Process {
    v1::NodeTask task;
    std::string files;  // Prefix of its .spec, .out and .err.
    pid_t pid = 0;
    TimePoint deadline;
    bool timed_out = false;
  };

  void StartProcess(const v1::NodeTask& task, TimePoint now, Children* children);
  v1::TaskResult ResultOf(const Process& process, int wait_status) const;

  const std::string directory_;
  const Programs programs_;
  const TaskLimits limits_;
  std::map<std::string, Process> processes_;  // Keyed by task id, as the others.
  std::map<std::string, std::future<v1::TaskResult>> removals_;
  std::map<std::string, v1::TaskResult> results_;
};

}  // namespace mbridge::agent
