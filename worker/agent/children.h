// Child processes of the agent: started with posix_spawn (gRPC has threads, so nothing here forks), reaped without
// waiting. Also reaps processes that were left to the agent where it is PID 1 of a container.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace mbridge::agent {

struct ChildSpec {
  std::vector<std::string> arguments;  // [0] is the program's path.
  std::string output_path;             // Standard output; appended to.
  std::string error_path;              // Standard error; may be the same file.
};

// Not thread-safe.
class Children {
 public:
  // A child in a new session with default signal handling and no standard input.
  absl::StatusOr<pid_t> Spawn(const ChildSpec& spec);
  // Collects every child that has ended.
  void Reap();
  // waitpid's status of a child that has ended, once; nullopt while it runs.
  std::optional<int> TakeEnd(pid_t pid);

 private:
  std::set<pid_t> running_;
  std::map<pid_t, int> ended_;
};

}  // namespace mbridge::agent
