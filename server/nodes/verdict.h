// Why an attempt ended and what that means for its job. Pure functions; the rules are the options in reason.proto.
#pragma once

#include <chrono>
#include <set>
#include <string>

#include "mbridge/v1/job.pb.h"

namespace mbridge::server {

inline constexpr int kDefaultMaxRestarts = 3;
inline constexpr int kMaxInfrastructureRestarts = 10;  // Lost nodes do not use up the job's own restarts.

struct Cause {
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  std::string detail;
};

// Fills in what a rank did not say: RANK_CRASHED after a signal, RANK_EXITED_WITHOUT_REASON else; exit code 0 alone is
// no success.
v1::RankEnd Normalized(v1::RankEnd end);

// True for ends that may follow from another rank's end: lost peers, timeouts, an obeyed SIGTERM.
bool IsSymptom(v1::Reason reason);

// The cause of an attempt whose ranks have all ended: COMPLETED when every rank completed; else the first bad end that
// is no symptom; `killed_by_us` are the ranks that ended by SIGKILL after the order to kill. An obeyed SIGTERM is a crash
// where no stop was ordered.
Cause CauseOf(const v1::Attempt& attempt, const std::set<int>& killed_by_us, bool stop_ordered);

struct Verdict {
  v1::JobState state = v1::JOB_STATE_FAILED;  // Terminal, or QUEUED for another attempt.
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  std::string detail;
  std::chrono::milliseconds back_off{0};
};

// `job.attempts` holds the earlier attempts with their reasons; the last one ended by `cause`.
Verdict Judge(const v1::Job& job, const Cause& cause);

}  // namespace mbridge::server
