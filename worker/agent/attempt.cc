#include "worker/agent/attempt.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <tuple>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"

namespace mbridge::agent {
namespace {

// A rank whose peer died hangs in its next collective. It gets a moment to notice by itself and to write why.
constexpr auto kPeerGrace = std::chrono::seconds(3);
constexpr auto kPeerKill = std::chrono::seconds(13);  // After the bad end.

absl::Status WriteSpecifications(const std::string& temporary, const std::string& directory, const v1::AttemptOrder& order) {
  const spool::AttemptDirectory files(temporary);
  for (v1::RankSpec spec : order.ranks()) {
    spec.set_attempt_directory(directory);
    MB_RETURN_IF_ERROR(spool::WriteProto(files.SpecPath(spec.rank()), spec));
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<std::pair<std::string, int>> ParseAttemptName(const std::string& name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string::npos || dot == 0) return std::nullopt;
  int attempt = 0;
  const char* end = name.data() + name.size();
  const auto [stop, failure] = std::from_chars(name.data() + dot + 1, end, attempt);
  if (failure != std::errc() || stop != end || attempt < 1) return std::nullopt;
  return std::pair(name.substr(0, dot), attempt);
}

absl::StatusOr<std::unique_ptr<Attempt>> Attempt::Create(const std::string& directory, const v1::AttemptOrder& order,
                                                         const std::string& boot_id) {
  if (order.ranks().empty()) return absl::InvalidArgumentError("ranks: an order to run needs at least one");
  const std::string parent = spool::DirectoryOf(directory);
  const std::string temporary = parent + "/.new-" + directory.substr(parent.size() + 1);
  std::filesystem::remove_all(temporary);
  if (::mkdir(temporary.c_str(), 0700) != 0) return spool::ErrnoStatus(errno, "cannot create " + temporary);
  absl::Status status = WriteSpecifications(temporary, directory, order);
  if (status.ok() && ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, directory.c_str(), RENAME_NOREPLACE) != 0) {
    status = spool::ErrnoStatus(errno, "cannot create " + directory);
  }
  if (status.ok()) status = spool::SyncDirectory(parent);
  if (!status.ok()) {
    std::filesystem::remove_all(temporary);
    return status;
  }
  return Load(directory, boot_id);
}

absl::StatusOr<std::unique_ptr<Attempt>> Attempt::Load(const std::string& directory, const std::string& boot_id, bool give_up) {
  std::unique_ptr<Attempt> attempt(new Attempt(directory));
  if (const absl::Status status = attempt->LoadRanks(boot_id); !status.ok()) {
    if (absl::IsUnavailable(status) && !give_up) return status;
    MB_RETURN_IF_ERROR(attempt->LoadDamaged(boot_id, std::string(status.message())));
  }
  return attempt;
}

absl::Status Attempt::LoadRanks(const std::string& boot_id) {
  const std::vector<int> ranks = files_.Ranks();
  if (ranks.empty()) return absl::DataLossError(files_.path() + " holds no rank specification");
  for (const int rank : ranks) {
    v1::RankSpec spec;
    MB_RETURN_IF_ERROR(spool::ReadProto(files_.SpecPath(rank), &spec));
    // An emptied file is a valid message without fields.
    if (spec.job_id().empty() || spec.rank() != rank) return absl::DataLossError(files_.SpecPath(rank) + " is damaged");
    job_id_ = spec.job_id();
    attempt_ = spec.attempt();
    several_nodes_ = spec.world_size() > static_cast<int>(ranks.size());
    ranks_.emplace_back(files_, rank, boot_id);
    devices_.push_back(spec.device());
    logs_.emplace_back(rank, files_.LogPath(rank));
  }
  return absl::OkStatus();
}

absl::Status Attempt::LoadDamaged(const std::string& boot_id, const std::string& damage) {
  const std::string name = std::filesystem::path(files_.path()).filename();
  const auto identity = ParseAttemptName(name);
  if (!identity) return absl::DataLossError(damage + ", and the name of its directory is not JOB.ATTEMPT");
  spdlog::error("attempt {} is ended: {}", name, damage);
  damage_ = damage;
  std::tie(job_id_, attempt_) = *identity;
  several_nodes_ = false;
  ranks_.clear();
  devices_.clear();
  logs_.clear();
  std::vector<int> ranks = files_.RanksWithFiles();
  if (ranks.empty()) ranks.push_back(0);  // An end must say what became of the attempt.
  for (const int rank : ranks) {
    ranks_.emplace_back(files_, rank, boot_id);
    devices_.push_back(v1::DEVICE_UNSPECIFIED);
    logs_.emplace_back(rank, files_.LogPath(rank));
  }
  SetDesired(v1::DESIRED_STATE_KILL, v1::REASON_NODE_LOST);
  return absl::OkStatus();
}

v1::AttemptPhase Attempt::phase() const {
  const auto has = [&](auto stage) {
    return std::any_of(ranks_.begin(), ranks_.end(), [&](const RankProcess& rank) { return rank.stage() == stage; });
  };
  if (has(RankStage::kUnclaimed) || has(RankStage::kStarting)) return v1::ATTEMPT_PHASE_STARTING;
  return has(RankStage::kRunning) ? v1::ATTEMPT_PHASE_RUNNING : v1::ATTEMPT_PHASE_ENDED;
}

void Attempt::SetDesired(v1::DesiredState desired, v1::Reason cause) {
  if (desired == v1::DESIRED_STATE_FORGET) desired = v1::DESIRED_STATE_KILL;  // What is to be forgotten must end first.
  if (desired <= desired_) return;
  desired_ = desired;
  cause_ = cause;
}

void Attempt::Acknowledge(const v1::AttemptOrder& order) {
  records_.Acknowledge(order.acknowledged_records());
  for (size_t i = 0; i < logs_.size(); ++i) {
    int64_t offset = 0;
    for (const v1::LogAck& ack : order.logs()) {
      if (ack.rank() == ranks_[i].rank()) offset = ack.offset();
    }
    logs_[i].Acknowledge(offset);
  }
  if (several_nodes_) rendezvous_.Store(order);
}

void Attempt::Tick(TimePoint now, const Programs& programs, Children* children) {
  for (RankProcess& rank : ranks_) rank.Refresh(children);
  if (desired_ == v1::DESIRED_STATE_RUN && !HasBadEnd()) StartRanks(programs, children);
  StopPeersOfFailedRank(now);
  for (RankProcess& rank : ranks_) {
    if (desired_ == v1::DESIRED_STATE_STOP) rank.Terminate(cause_);
    if (desired_ == v1::DESIRED_STATE_KILL) rank.Kill(CauseOfKill(rank), now);
  }
}

v1::Reason Attempt::CauseOfKill(const RankProcess& rank) const {
  if (!damage_.empty()) return cause_;
  // Its peers, perhaps on other nodes, wait for a stopped process in vain; where a user killed the job, that is its reason
  // anyway.
  if (rank.IsStopped() && (!HasBadEnd() || TimedOut())) return v1::REASON_COLLECTIVE_TIMEOUT;
  // A coordinator that kills what a failed rank left over did not hear that from a user.
  return HasBadEnd() ? v1::REASON_PEER_LOST : cause_;
}

void Attempt::StartRanks(const Programs& programs, Children* children) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const std::string& program = devices_[i] == v1::DEVICE_CUDA ? programs.cuda_rank : programs.rank;
    ranks_[i].Start(programs.shim, program, children);
  }
}

bool Attempt::HasBadEnd() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const RankProcess& rank) {
    // A cancelled rank ended as it should; its peers may still be busy with the checkpoint.
    return rank.ended() && rank.end().reason() != v1::REASON_COMPLETED && rank.end().reason() != v1::REASON_CANCELLED_BY_USER &&
           rank.end().reason() != v1::REASON_SHUTDOWN;
  });
}

void Attempt::StopPeersOfFailedRank(TimePoint now) {
  if (!HasBadEnd()) return;
  if (bad_end_at_ == TimePoint{}) bad_end_at_ = now;
  for (RankProcess& rank : ranks_) {
    // A stopped process obeys nothing but SIGKILL: where its peers gave up waiting, it is what they waited for.
    const bool stopped = now - bad_end_at_ >= kPeerGrace && rank.IsStopped();
    const v1::Reason cause = TimedOut() && (stopped || IsLast(rank)) ? v1::REASON_COLLECTIVE_TIMEOUT : v1::REASON_PEER_LOST;
    if (stopped || now - bad_end_at_ >= kPeerKill) {
      rank.Kill(cause, now);
    } else if (rank.stage() == RankStage::kUnclaimed || now - bad_end_at_ >= kPeerGrace) {
      rank.Terminate(v1::REASON_PEER_LOST);
    }
  }
}

bool Attempt::TimedOut() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const RankProcess& rank) {
    return rank.ended() && rank.end().reason() == v1::REASON_COLLECTIVE_TIMEOUT;
  });
}

bool Attempt::IsLast(const RankProcess& rank) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const RankProcess& other) { return &other == &rank || other.ended(); });
}

void Attempt::Report(v1::AttemptReport* report, Budget* budget) {
  report->set_job_id(job_id_);
  report->set_attempt(attempt_);
  // The phase is read before the files: what a rank wrote before its end is in this report or a later one.
  report->set_phase(phase());
  for (const RankProcess& rank : ranks_) {
    if (!rank.ended()) continue;
    v1::RankEnd* end = report->add_rank_ends();
    *end = rank.end();
    if (!damage_.empty()) end->set_detail(fmt::format("{} ({})", damage_, end->detail()));
  }
  bool complete = records_.Fill(report, budget);
  for (LogFeed& log : logs_) complete = log.Fill(report, budget) && complete;
  if (several_nodes_) rendezvous_.Fill(report, budget);
  drained_ = ended() && complete;
  report->set_drained(drained_);
}

}  // namespace mbridge::agent
