// One rank of an attempt as the agent sees it: what the files of its shim say, and which of the recorded processes live.
//
// Everything is derived from the attempt directory, so that a restarted agent comes to the same conclusions.
#pragma once

#include <chrono>
#include <string>

#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/rank.pb.h"
#include "worker/agent/children.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/process_identity.h"

namespace mbridge::agent {

using TimePoint = std::chrono::steady_clock::time_point;

enum class RankStage {
  kUnclaimed,  // No shim has it yet.
  kStarting,   // A shim has it, the rank process is not there yet.
  kRunning,
  kEnded,  // Reaped, or known to be gone; end() says how.
};

// Not thread-safe.
class RankProcess {
 public:
  RankProcess(spool::AttemptDirectory files, int rank, std::string boot_id);

  int rank() const { return rank_; }
  RankStage stage() const { return stage_; }
  bool ended() const { return stage_ == RankStage::kEnded; }
  const v1::RankEnd& end() const { return end_; }

  // Looks at files and processes.
  void Refresh(Children* children);
  // Starts the shim of an unclaimed rank, unless that was done already.
  void Start(const std::string& shim_program, const std::string& rank_program, Children* children);
  // SIGTERM, once; SIGKILL, and 5 s later to shim and session. An unclaimed rank is claimed and so never starts. `cause` is
  // kept on disk and becomes the reason of an end that the rank itself does not explain.
  void Terminate(v1::Reason cause);
  // Whether the process runs but was stopped by a signal.
  bool IsStopped() const;
  void Kill(v1::Reason cause, TimePoint now);

 private:
  bool ReadExit();
  void ReadProcess();
  void RememberCause(v1::Reason cause);
  void GiveUp(v1::Reason reason, const std::string& detail);
  void Claim();
  void EndFromExit(const v1::ExitRecord& exit);
  void End(v1::Reason reason, const std::string& detail);
  // What the rank itself wrote; UNSPECIFIED where it wrote nothing.
  v1::RankResult OwnResult() const;
  std::string WithLastLogLine(const std::string& text) const;

  const spool::AttemptDirectory files_;
  const int rank_;
  const std::string boot_id_;
  RankStage stage_ = RankStage::kUnclaimed;
  v1::RankEnd end_;
  spool::ProcessIdentity shim_;
  spool::ProcessIdentity process_;
  pid_t child_ = 0;  // The shim, where this agent started it.
  v1::Reason cause_ = v1::REASON_UNSPECIFIED;
  bool terminated_ = false;
  TimePoint killed_at_{};
};

}  // namespace mbridge::agent
