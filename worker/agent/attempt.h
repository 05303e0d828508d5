// One attempt of a job on this node: its ranks, what should become of them, and what is reported about them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/agent_service.pb.h"
#include "worker/agent/rank_process.h"
#include "worker/agent/record_feed.h"

namespace mbridge::agent {

struct Programs {
  std::string shim;
  std::string rank;       // CPU.
  std::string cuda_rank;  // Ranks with DEVICE_CUDA.
};

// Job id and attempt number of "JOB.ATTEMPT", as the directory of an attempt is called.
std::optional<std::pair<std::string, int>> ParseAttemptName(const std::string& name);

// Not thread-safe.
class Attempt {
 public:
  // Creates the directory with all specifications by one rename. ALREADY_EXISTS where it is there: an attempt is made once.
  static absl::StatusOr<std::unique_ptr<Attempt>> Create(const std::string& directory, const v1::AttemptOrder& order,
                                                         const std::string& boot_id);
  // From the directory of an earlier agent. Where a specification cannot be read, the attempt takes its identity from the name
  // of the directory, its ranks from their other files, and ends them all with NODE_LOST. DATA_LOSS where the name says nothing.
  // UNAVAILABLE where the disk gave an error (nothing is ended: the specification may be readable later), unless `give_up`.
  static absl::StatusOr<std::unique_ptr<Attempt>> Load(const std::string& directory, const std::string& boot_id,
                                                       bool give_up = false);

  const std::string& job_id() const { return job_id_; }
  int attempt() const { return attempt_; }
  const spool::AttemptDirectory& files() const { return files_; }
  v1::AttemptPhase phase() const;
  bool ended() const { return phase() == v1::ATTEMPT_PHASE_ENDED; }
  // The last report held all there will ever be.
  bool drained() const { return drained_; }

  // What to work towards from now on. STOP and KILL give `cause` to the ranks they end; RUN does not undo them.
  void SetDesired(v1::DesiredState desired, v1::Reason cause);
  // Acknowledgements and rendezvous keys of an order.
  void Acknowledge(const v1::AttemptOrder& order);
  // One round of supervision.
  void Tick(TimePoint now, const Programs& programs, Children* children);

  void Report(v1::AttemptReport* report, Budget* budget);
  // The Sync with the last report was answered.
  void Delivered() { rendezvous_.Delivered(); }
  void CoordinatorChanged() { rendezvous_.SendAllAgain(); }

 private:
  explicit Attempt(std::string directory) : files_(std::move(directory)), rendezvous_(files_.RendezvousPath()) {}
  absl::Status LoadRanks(const std::string& boot_id);
  absl::Status LoadDamaged(const std::string& boot_id, const std::string& damage);
  void StartRanks(const Programs& programs, Children* children);
  void StopPeersOfFailedRank(TimePoint now);
  // Whether a rank ended because its peers did not join a collective in time.
  bool TimedOut() const;
  // Whether all others ended.
  bool IsLast(const RankProcess& rank) const;
  bool HasBadEnd() const;
  // Of a rank that the coordinator wants killed.
  v1::Reason CauseOfKill(const RankProcess& rank) const;

  const spool::AttemptDirectory files_;
  std::string job_id_;
  int attempt_ = 0;
  std::string damage_;  // Why the specifications cannot be read; empty where they can.
  bool several_nodes_ = false;
  v1::DesiredState desired_ = v1::DESIRED_STATE_UNSPECIFIED;
  v1::Reason cause_ = v1::REASON_UNSPECIFIED;
  std::vector<RankProcess> ranks_;
  std::vector<v1::Device> devices_;  // As ranks_.
  RecordFeed records_{files_.SpoolPath()};
  std::vector<LogFeed> logs_;
  RendezvousRelay rendezvous_;
  TimePoint bad_end_at_{};
  bool drained_ = false;
};

}  // namespace mbridge::agent
