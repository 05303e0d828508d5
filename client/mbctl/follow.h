// Following a job to its end: Megatron's lines on stdout, states and the progress line on stderr, its exit code.
#pragma once

#include <optional>
#include <string>

#include "client/mbctl/session.h"

namespace CLI {
class App;
}

namespace mbridge::mbctl {

struct FollowOptions {
  bool lines = false;                     // --follow: one line per point; else only states (--wait).
  bool throughput = false;                // logger.log_throughput of the job: TFLOP/s in the lines.
  std::optional<double> timeout_seconds;  // Exit code 6 after it; the job goes on.
  bool cancel_on_interrupt = false;       // First Ctrl-C cancels the job, the second detaches.
};

// Returns the exit code: of the job; 6 after the timeout; 7 when the connection stays lost; 130 after Ctrl-C.
int FollowJob(Session* session, const std::string& job_id, const FollowOptions& options);

// What Ctrl-C prints before exit code 130.
void SayDetached(Session* session, const std::string& job_id, const std::string& again);

// `mbctl follow JOB` and `mbctl wait JOB`.
void AddFollow(CLI::App* app, Session* session);

// --timeout, --cancel-on-interrupt, for commands that can follow.
struct FollowFlags {
  bool follow = false;
  bool wait = false;
  std::string timeout;
  bool cancel_on_interrupt = false;
};
void AddFollowFlags(CLI::App* command, FollowFlags* flags, bool with_mode);
absl::StatusOr<FollowOptions> ToFollowOptions(const FollowFlags& flags);

}  // namespace mbridge::mbctl
