#include "server/nodes/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <tuple>

#include "proto/rpc/status_details.h"

namespace mbridge::server {
namespace {

int CountAttempts(const v1::Job& job, v1::RetryRule rule) {
  return static_cast<int>(std::count_if(job.attempts().begin(), job.attempts().end(), [rule](const v1::Attempt& attempt) {
    return attempt.has_end_time() && InfoOf(attempt.reason()).retry() == rule;
  }));
}

// Attempts at the end of the list that did not get a step further.
int AttemptsWithoutProgress(const v1::Job& job) {
  int count = 0;
  for (auto attempt = job.attempts().rbegin(); attempt != job.attempts().rend(); ++attempt, ++count) {
    if (attempt->last_step() > attempt->first_step()) break;
  }
  return count;
}

int MaxRestarts(const v1::JobSpec& spec) {
  if (spec.max_restarts() < 0) return 0;
  return spec.max_restarts() == 0 ? kDefaultMaxRestarts : spec.max_restarts();
}

// A failure of the job's own that is worth telling although a stop was under way, such as a full disk at the last save.
bool IsOwnFailure(v1::Reason reason) {
  switch (reason) {
    case v1::REASON_NAN_LOSS:
    case v1::REASON_ENGINE_ERROR:
    case v1::REASON_OUT_OF_MEMORY:
    case v1::REASON_DISK_FULL:
    case v1::REASON_CHECKPOINT_CORRUPT:
    case v1::REASON_CHECKPOINT_IO_ERROR:
    case v1::REASON_DATA_ERROR: return true;
    default: return false;
  }
}

// Ends of ranks that did what a signal told them.
bool ObeyedAStop(v1::Reason reason) {
  return reason == v1::REASON_CANCELLED_BY_USER || reason == v1::REASON_KILLED_BY_USER || reason == v1::REASON_SHUTDOWN;
}

Verdict JudgeStopped(const v1::Job& job, const Cause& cause) {
  if (!job.kill_requested() && IsOwnFailure(cause.reason)) return {v1::JOB_STATE_FAILED, cause.reason, cause.detail, {}};
  // While stopping, job.reason says who asked for it.
  const auto state = job.reason() == v1::REASON_WALL_TIME_EXCEEDED ? v1::JOB_STATE_FAILED : v1::JOB_STATE_CANCELLED;
  // How far the rank came that did as it was told.
  const std::string how = cause.reason == v1::REASON_CANCELLED_BY_USER ? cause.detail : "";
  return {state, job.reason(), job.detail() + (job.detail().empty() || how.empty() ? "" : "; ") + how, {}};
}

}  // namespace

v1::RankEnd Normalized(v1::RankEnd end) {
  if (end.reason() == v1::REASON_COMPLETED && (end.exit_code() != 0 || end.signal() != 0)) {
    end.set_reason(v1::REASON_UNSPECIFIED);  // Died after its last word.
  }
  if (end.reason() != v1::REASON_UNSPECIFIED) return end;
  if (end.signal() != 0) {
    end.set_reason(v1::REASON_RANK_CRASHED);
    if (end.detail().empty()) end.set_detail(fmt::format("signal {} ({})", end.signal(), strsignal(end.signal())));
  } else {
    end.set_reason(v1::REASON_RANK_EXITED_WITHOUT_REASON);
    if (end.detail().empty()) end.set_detail(fmt::format("exit code {} without a result", end.exit_code()));
  }
  return end;
}

bool IsSymptom(v1::Reason reason) {
  return reason == v1::REASON_PEER_LOST || reason == v1::REASON_COLLECTIVE_TIMEOUT || ObeyedAStop(reason);
}

Cause CauseOf(const v1::Attempt& attempt, const std::set<int>& killed_by_us, bool stop_ordered) {
  const v1::RankEnd* cause = nullptr;
  const auto order = [&](const v1::RankEnd& end) {
    // An agent that finds a stopped process when it must kill it says COLLECTIVE_TIMEOUT.
    const bool killed = killed_by_us.contains(end.rank()) && end.reason() != v1::REASON_COLLECTIVE_TIMEOUT;
    const bool obeyed = ObeyedAStop(end.reason()) || killed;
    const int guilt = end.reason() == v1::REASON_PEER_LOST ? 3 : obeyed ? 2 : IsSymptom(end.reason());
    // Of those that timed out, the one that had to be killed is what the others waited for.
    const bool waited = end.reason() == v1::REASON_COLLECTIVE_TIMEOUT && end.signal() == 0;
    return std::make_tuple(guilt, waited, end.time().seconds(), end.time().nanos(), end.rank());
  };
  for (const v1::RankEnd& end : attempt.rank_ends()) {
    if (end.reason() == v1::REASON_COMPLETED) continue;
    if (cause == nullptr || order(end) < order(*cause)) cause = &end;
  }
  if (cause != nullptr && ObeyedAStop(cause->reason()) && !stop_ordered) {
    if (cause->reason() == v1::REASON_SHUTDOWN) return {v1::REASON_NODE_LOST, "the agent of the node was shut down"};
    return {v1::REASON_RANK_CRASHED,
            fmt::format("rank {} was stopped by a signal that nobody asked the service for", cause->rank())};
  }
  if (cause != nullptr) {
    return {cause->reason(),
            attempt.placement_size() == 1 ? cause->detail() : fmt::format("rank {}: {}", cause->rank(), cause->detail())};
  }
  if (attempt.rank_ends_size() < attempt.placement_size()) {
    return {v1::REASON_RANK_EXITED_WITHOUT_REASON,
            fmt::format("{} of {} ranks never reported their end", attempt.placement_size() - attempt.rank_ends_size(),
                        attempt.placement_size())};
  }
  return {v1::REASON_COMPLETED, ""};
}

Verdict Judge(const v1::Job& job, const Cause& cause) {
  if (cause.reason == v1::REASON_COMPLETED) return {v1::JOB_STATE_SUCCEEDED, cause.reason, cause.detail, {}};
  if (job.state() == v1::JOB_STATE_STOPPING) return JudgeStopped(job, cause);
  const v1::RetryRule rule = InfoOf(cause.reason).retry();
  if (rule != v1::RETRY_RULE_FROM_CHECKPOINT && rule != v1::RETRY_RULE_INFRASTRUCTURE) {
    return {v1::JOB_STATE_FAILED, cause.reason, cause.detail, {}};
  }
  const int limit = rule == v1::RETRY_RULE_INFRASTRUCTURE ? kMaxInfrastructureRestarts : MaxRestarts(job.spec());
  const int ended = CountAttempts(job, rule);  // This one included.
  const std::string text = fmt::format("{}: {}", ReasonName(cause.reason), cause.detail);
  if (limit == 0) return {v1::JOB_STATE_FAILED, cause.reason, cause.detail, {}};
  if (ended > limit) {
    return {v1::JOB_STATE_FAILED, v1::REASON_TOO_MANY_RESTARTS, fmt::format("after {} restarts, last {}", limit, text), {}};
  }
  // 1 s where the attempt got somewhere, else doubled with each that did not, up to about a minute.
  constexpr int kLongestShift = 6;
  const int barren = std::clamp(AttemptsWithoutProgress(job) - 1, 0, kLongestShift);
  const std::chrono::milliseconds back_off = std::chrono::seconds(1) * (1 << barren);
  return {v1::JOB_STATE_QUEUED, v1::REASON_WAITING_FOR_RETRY,
          fmt::format("attempt {} ended: {}; restart {} of {} in {} s", job.attempts_size(), text, ended, limit,
                      back_off.count() / 1000),
          back_off};
}

}  // namespace mbridge::server
