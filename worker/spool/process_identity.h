// Which process a pid meant: pid and start time within a boot, so that a reused pid is never taken for the old process.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge::spool {

struct ProcessIdentity {
  std::string boot_id;
  pid_t pid = 0;             // 0: no process.
  uint64_t start_ticks = 0;  // Field 22 of /proc/<pid>/stat.

  bool operator==(const ProcessIdentity&) const = default;
};

// Fields of /proc/<pid>/stat.
struct ProcessStat {
  char state = '?';
  pid_t parent = 0;
  pid_t group = 0;
  pid_t session = 0;
  uint64_t start_ticks = 0;
};

// Of the running kernel, from /proc.
absl::StatusOr<std::string> CurrentBootId();

// NOT_FOUND where there is no such process.
absl::StatusOr<ProcessStat> StatOf(pid_t pid);
absl::StatusOr<ProcessIdentity> IdentityOf(pid_t pid);

// True while exactly this process runs. Zombies count as dead.
bool IsAlive(const ProcessIdentity& process);

// Signals exactly this process, through a pidfd. NOT_FOUND when it is gone.
absl::Status SignalProcess(const ProcessIdentity& process, int signal);

// SIGKILL to every process of the session that `leader` made, except `leader` itself; returns how many. Does nothing
// where the leader's pid belongs to another process now, for then the session is gone.
int KillSession(const ProcessIdentity& leader);

}  // namespace mbridge::spool
