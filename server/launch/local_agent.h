// The agent on the coordinator's own machine: adopted where one runs, else started.
#pragma once

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace mbridge::server {

struct LocalAgentOptions {
  std::string program;      // Empty: mbagent beside the running program.
  std::string directory;    // The agent's state directory; its lock file is agent.lock.
  std::string coordinator;  // Address that the agent dials.
};

// True where a living agent holds the lock of the directory.
bool LocalAgentRuns(const std::string& directory);

// The pid of a new agent in a session of its own, so that it outlives the coordinator; 0 where one was adopted. Its
// output goes to <directory>/agent.log.
absl::StatusOr<pid_t> StartLocalAgent(const LocalAgentOptions& options);

}  // namespace mbridge::server
