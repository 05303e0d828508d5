#include "worker/agent/rank_process.h"

#include <signal.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "worker/spool/file.h"
#include "worker/spool/timestamp.h"

namespace mbridge::agent {
namespace {

constexpr auto kUnkillable = std::chrono::seconds(5);
constexpr std::streamoff kLogTail = 400;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// Signals that others send: the rank's log does not know of them.
bool IsSentByOthers(int signal) {
  switch (signal) {
    case SIGKILL:
    case SIGTERM:
    case SIGINT:
    case SIGHUP:
    case SIGQUIT: return true;
    default: return false;
  }
}

std::string DescribeEnd(int exit_code, int signal) {
  if (signal != 0) return fmt::format("signal {} ({})", signal, ::strsignal(signal));
  return fmt::format("exit code {}", exit_code);
}

}  // namespace

RankProcess::RankProcess(spool::AttemptDirectory files, int rank, std::string boot_id)
    : files_(std::move(files)), rank_(rank), boot_id_(std::move(boot_id)) {
  v1::RankResult stop;
  if (spool::ReadProto(files_.StopPath(rank_), &stop).ok()) cause_ = stop.reason();
}

void RankProcess::Start(const std::string& shim_program, const std::string& rank_program, Children* children) {
  if (stage_ != RankStage::kUnclaimed || child_ != 0) return;
  const std::string log = files_.LogPath(rank_);
  const absl::StatusOr<pid_t> pid =
      children->Spawn({{shim_program, "--spec", files_.SpecPath(rank_), "--program", rank_program}, log, log});
  if (pid.ok()) {
    child_ = *pid;
  } else {
    GiveUp(v1::REASON_SPAWN_FAILED, Text(pid.status()));
  }
}

void RankProcess::Refresh(Children* children) {
  if (ended()) return;
  const std::optional<int> child_end = child_ != 0 ? children->TakeEnd(child_) : std::nullopt;
  if (ReadExit()) return;
  ReadProcess();
  if (child_end.has_value()) {
    child_ = 0;
    if (stage_ == RankStage::kUnclaimed) {
      GiveUp(v1::REASON_SPAWN_FAILED, WithLastLogLine("the shim could not start the rank"));
    }
  }
  if (ended() || stage_ == RankStage::kUnclaimed) return;
  if (shim_.boot_id != boot_id_) return End(v1::REASON_NODE_LOST, "the node rebooted while the rank ran");
  if (spool::IsAlive(shim_)) return;

  // The shim is gone. It may have written its last files after they were read above.
  if (ReadExit()) return;
  ReadProcess();
  if (spool::SignalProcess(process_, SIGKILL).ok()) return;  // Until it is gone.
  spool::KillSession(shim_);
  End(cause_ != v1::REASON_UNSPECIFIED ? cause_ : v1::REASON_RANK_CRASHED,
      WithLastLogLine("its shim ended without an exit record"));
}

bool RankProcess::ReadExit() {
  v1::ExitRecord exit;
  const absl::Status status = spool::ReadProto(files_.ExitPath(rank_), &exit);
  if (status.ok()) EndFromExit(exit);
  if (absl::IsDataLoss(status)) spdlog::error("{}", Text(status));
  return status.ok();
}

void RankProcess::ReadProcess() {
  if (stage_ == RankStage::kRunning) return;
  v1::ProcessRecord record;
  if (!spool::ReadProto(files_.ProcessPath(rank_), &record).ok()) return;
  if (record.shim_pid() == 0) {
    const v1::RankResult own = OwnResult();
    if (own.reason() != v1::REASON_UNSPECIFIED) return End(own.reason(), own.detail());
    return End(cause_ != v1::REASON_UNSPECIFIED ? cause_ : v1::REASON_SPAWN_FAILED, "never started");
  }
  shim_ = {record.boot_id(), record.shim_pid(), record.shim_start_ticks()};
  process_ = {record.boot_id(), record.rank_pid(), record.rank_start_ticks()};
  stage_ = record.rank_pid() != 0 ? RankStage::kRunning : RankStage::kStarting;
}

void RankProcess::Claim() {
  const absl::Status status = spool::WriteProtoExclusively(files_.ProcessPath(rank_), v1::ProcessRecord());
  if (!status.ok() && !absl::IsAlreadyExists(status)) spdlog::error("rank {}: {}", rank_, Text(status));
  ReadProcess();
}

void RankProcess::GiveUp(v1::Reason reason, const std::string& detail) {
  v1::RankResult result;
  result.set_reason(reason);
  result.set_detail(detail);
  if (const absl::Status status = spool::WriteProto(files_.ResultPath(rank_), result); !status.ok()) {
    spdlog::error("rank {}: {}", rank_, Text(status));
  }
  Claim();
  // On a full disk the claim is not possible. The shim that ended or never came cannot come back either.
  if (stage_ == RankStage::kUnclaimed) End(reason, detail);
}

void RankProcess::RememberCause(v1::Reason cause) {
  if (cause_ == cause) return;
  cause_ = cause;
  v1::RankResult stop;
  stop.set_reason(cause);
  if (const absl::Status status = spool::WriteProto(files_.StopPath(rank_), stop); !status.ok()) {
    spdlog::warn("rank {}: {}", rank_, Text(status));
  }
}

void RankProcess::Terminate(v1::Reason cause) {
  if (ended() || terminated_ || killed_at_ != TimePoint{}) return;
  RememberCause(cause);
  if (stage_ == RankStage::kUnclaimed) Claim();
  if (stage_ == RankStage::kRunning) terminated_ = spool::SignalProcess(process_, SIGTERM).ok();
}

bool RankProcess::IsStopped() const {
  if (stage_ != RankStage::kRunning || !spool::IsAlive(process_)) return false;
  const auto stat = spool::StatOf(process_.pid);
  return stat.ok() && (stat->state == 'T' || stat->state == 't');
}

void RankProcess::Kill(v1::Reason cause, TimePoint now) {
  if (ended()) return;
  if (killed_at_ == TimePoint{}) {
    killed_at_ = now;
    RememberCause(cause);
  }
  if (stage_ == RankStage::kUnclaimed) return Claim();
  // Refresh sees the result; a process that is gone already is no error.
  if (stage_ == RankStage::kRunning) spool::SignalProcess(process_, SIGKILL).IgnoreError();
  if (stage_ == RankStage::kStarting || now - killed_at_ > kUnkillable) {
    spool::KillSession(shim_);
    spool::SignalProcess(shim_, SIGKILL).IgnoreError();
  }
}

v1::RankResult RankProcess::OwnResult() const {
  v1::RankResult result;
  const absl::Status status = spool::ReadProto(files_.ResultPath(rank_), &result);
  if (!status.ok() && !absl::IsNotFound(status)) spdlog::error("{}", Text(status));
  return status.ok() ? result : v1::RankResult();
}

void RankProcess::EndFromExit(const v1::ExitRecord& exit) {
  end_.set_exit_code(exit.signal() != 0 ? -1 : exit.exit_code());
  end_.set_signal(exit.signal());
  *end_.mutable_time() = exit.time();
  const v1::RankResult own = OwnResult();
  const bool success = exit.signal() == 0 && exit.exit_code() == 0;
  const bool explained = own.reason() != v1::REASON_UNSPECIFIED && (own.reason() != v1::REASON_COMPLETED || success);
  // A rank takes every SIGTERM for a cancellation; only the agent knows better.
  const bool stopped = cause_ != v1::REASON_UNSPECIFIED && (!explained || own.reason() == v1::REASON_CANCELLED_BY_USER);
  const std::string how = DescribeEnd(exit.exit_code(), exit.signal());
  if (stopped && cause_ == v1::REASON_COLLECTIVE_TIMEOUT && !explained)
    return End(cause_, fmt::format("its peers waited for it in vain: it was stopped or did not obey SIGTERM ({})", how));
  if (stopped) return End(cause_, explained ? own.detail() : how);
  if (explained) return End(own.reason(), own.detail());
  End(exit.signal() != 0 ? v1::REASON_RANK_CRASHED : v1::REASON_RANK_EXITED_WITHOUT_REASON,
      IsSentByOthers(exit.signal()) ? how : WithLastLogLine(how));
}

void RankProcess::End(v1::Reason reason, const std::string& detail) {
  stage_ = RankStage::kEnded;
  end_.set_rank(rank_);
  end_.set_reason(reason);
  end_.set_detail(detail);
  if (!end_.has_time()) {
    end_.set_exit_code(-1);
    *end_.mutable_time() = spool::NowTimestamp();
  }
}

std::string RankProcess::WithLastLogLine(const std::string& text) const {
  std::ifstream log(files_.LogPath(rank_), std::ios::binary | std::ios::ate);
  if (!log) return text;
  const std::streamoff size = log.tellg();
  std::string tail(static_cast<size_t>(std::min(size, kLogTail)), '\0');
  log.seekg(size - static_cast<std::streamoff>(tail.size()));
  log.read(tail.data(), static_cast<std::streamsize>(tail.size()));
  while (!tail.empty() && (tail.back() == '\n' || tail.back() == '\r')) tail.pop_back();
  tail.erase(0, tail.find_last_of("\n\r") + 1);
  // Protobuf strings must be UTF-8, a log may hold anything.
  for (char& byte : tail) {
    if (static_cast<unsigned char>(byte) < 0x20 || static_cast<unsigned char>(byte) >= 0x7f) byte = '?';
  }
  return tail.empty() ? text : fmt::format("{}; last line of its log: {}", text, tail);
}

}  // namespace mbridge::agent
