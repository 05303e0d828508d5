#include "worker/shim/shim.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "mbridge/v1/rank.pb.h"
#include "proto/rpc/status_details.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/file.h"
#include "worker/spool/process_identity.h"
#include "worker/spool/timestamp.h"

namespace mbridge::shim {
namespace {

using spool::ErrnoStatus;

constexpr int kNotExecuted = 127;
constexpr auto kLeftoverLimit = std::chrono::seconds(5);
constexpr int kExitRecordTries = 20;  // Half a second apart: a disk that is full for a moment.

constexpr int kForwarded[] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2};

absl::Status RedirectOutput(const std::string& log_path) {
  const int null = ::open("/dev/null", O_RDONLY);
  const int log = ::open(log_path.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (log < 0) return ErrnoStatus(errno, "cannot open " + log_path);
  if (null < 0) return ErrnoStatus(errno, "cannot open /dev/null");
  if (::dup2(null, 0) < 0 || ::dup2(log, 1) < 0 || ::dup2(log, 2) < 0) return ErrnoStatus(errno, "cannot redirect output");
  ::syscall(SYS_close_range, 3u, ~0u, 0u);
  return absl::OkStatus();
}

// The signals that the shim takes with sigwaitinfo; blocked from before the fork, so that none is lost.
sigset_t BlockSignals() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGCHLD);
  for (const int signal : kForwarded) ::sigaddset(&set, signal);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
  return set;
}

struct Pipe {
  int read_end = -1;
  int write_end = -1;
};

absl::StatusOr<Pipe> MakePipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "cannot make a pipe");
  return Pipe{ends[0], ends[1]};
}

// In the child, between fork and exec.
[[noreturn]] void BecomeRank(const ShimOptions& options, pid_t shim_pid, const Pipe& release, const Pipe& failure) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != shim_pid) ::_exit(kNotExecuted);  // Died before the line above.
  ::setpgid(0, 0);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGHUP, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  ::close(release.write_end);
  char byte = 0;
  ssize_t got = 0;
  do {
    got = ::read(release.read_end, &byte, 1);
  } while (got < 0 && errno == EINTR);
  if (got != 1) ::_exit(kNotExecuted);
  const char* const arguments[] = {options.program.c_str(), "--spec", options.spec_path.c_str(), nullptr};
  ::execv(options.program.c_str(), const_cast<char* const*>(arguments));
  const int error_number = errno;
  if (::write(failure.write_end, &error_number, sizeof(error_number)) < 0) ::_exit(kNotExecuted);
  ::_exit(kNotExecuted);
}

// Children that were left to this subreaper outside the rank's session.
void KillAdopted(pid_t self) {
  DIR* directory = ::opendir("/proc");
  if (directory == nullptr) return;
  while (const dirent* entry = ::readdir(directory)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid <= 0) continue;
    const auto stat = spool::StatOf(pid);
    if (stat.ok() && stat->parent == self && stat->state != 'Z') ::kill(pid, SIGKILL);
  }
  ::closedir(directory);
}

class Shim {
 public:
  explicit Shim(const ShimOptions& options)
      : options_(options), files_(spool::DirectoryOf(options.spec_path)), pid_(::getpid()) {}

  absl::Status Run();

 private:
  absl::Status Prepare();
  absl::Status Claim();
  absl::Status Spawn();
  void WaitForRank();
  void ReapAll();
  void KillLeftovers();
  absl::Status WriteResultOfFailedExec() const;
  absl::Status WriteExit() const;

  const ShimOptions& options_;
  const spool::AttemptDirectory files_;
  const pid_t pid_;
  sigset_t signals_{};
  v1::RankSpec spec_;
  spool::ProcessIdentity self_;
  v1::ProcessRecord process_;
  pid_t rank_pid_ = 0;
  int exec_error_ = 0;
  std::optional<int> wait_status_;
  int64_t max_rss_bytes_ = 0;
};

absl::Status Shim::Prepare() {
  MB_RETURN_IF_ERROR(spool::ReadProto(options_.spec_path, &spec_));
  if (options_.spec_path != files_.SpecPath(spec_.rank())) {
    return absl::InvalidArgumentError(fmt::format("--spec {}: the file of rank {} must be {}", options_.spec_path, spec_.rank(),
                                                  files_.SpecPath(spec_.rank())));
  }
  MB_RETURN_IF_ERROR(RedirectOutput(files_.LogPath(spec_.rank())));
  ::setsid();  // Fails, harmlessly, where the caller made the session.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  signals_ = BlockSignals();
  // A spinning OpenMP barrier on a busy core costs a time slice: 1 s instead of 5 ms a step of a small model.
  ::setenv("OMP_WAIT_POLICY", "passive", 0);
  if (spec_.threads() > 0) ::setenv("OMP_NUM_THREADS", std::to_string(spec_.threads()).c_str(), 1);
  if (!spec_.gpu_uuid().empty()) ::setenv("CUDA_VISIBLE_DEVICES", spec_.gpu_uuid().c_str(), 1);
  return absl::OkStatus();
}

absl::Status Shim::Claim() {
  MB_ASSIGN_OR_RETURN(self_, spool::IdentityOf(pid_));
  process_.set_boot_id(self_.boot_id);
  process_.set_shim_pid(pid_);
  process_.set_shim_start_ticks(self_.start_ticks);
  return spool::WriteProtoExclusively(files_.ProcessPath(spec_.rank()), process_);
}

absl::Status Shim::Spawn() {
  MB_ASSIGN_OR_RETURN(const Pipe release, MakePipe());
  MB_ASSIGN_OR_RETURN(const Pipe failure, MakePipe());
  rank_pid_ = ::fork();
  if (rank_pid_ < 0) return ErrnoStatus(errno, "cannot fork");
  if (rank_pid_ == 0) BecomeRank(options_, pid_, release, failure);
  ::close(release.read_end);
  ::close(failure.write_end);

  absl::Status status;
  if (const auto rank = spool::IdentityOf(rank_pid_); rank.ok()) {
    process_.set_rank_pid(rank_pid_);
    process_.set_rank_start_ticks(rank->start_ticks);
    status = spool::WriteProto(files_.ProcessPath(spec_.rank()), process_);
  } else {
    status = rank.status();
  }
  // Closing the pipe without a byte ends the child before it executes anything.
  if (status.ok() && ::write(release.write_end, "", 1) != 1) status = ErrnoStatus(errno, "cannot release the rank");
  ::close(release.write_end);
  if (::read(failure.read_end, &exec_error_, sizeof(exec_error_)) != sizeof(exec_error_)) exec_error_ = 0;
  ::close(failure.read_end);
  return status;
}

void Shim::ReapAll() {
  while (true) {
    int status = 0;
    rusage usage{};
    const pid_t pid = ::wait4(-1, &status, WNOHANG, &usage);
    if (pid <= 0) return;
    if (pid != rank_pid_) continue;
    wait_status_ = status;
    max_rss_bytes_ = usage.ru_maxrss * int64_t{1024};
  }
}

void Shim::WaitForRank() {
  while (true) {
    ReapAll();
    if (wait_status_.has_value()) return;
    const int signal = ::sigwaitinfo(&signals_, nullptr);
    // Not reaped yet, so the pid is still the rank's.
    if (signal > 0 && signal != SIGCHLD) ::kill(rank_pid_, signal);
  }
}

void Shim::KillLeftovers() {
  const auto deadline = std::chrono::steady_clock::now() + kLeftoverLimit;
  while (std::chrono::steady_clock::now() < deadline) {
    ReapAll();
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) return;
    spool::KillSession(self_);
    KillAdopted(pid_);
    const timespec pause{0, 10'000'000};
    ::sigtimedwait(&signals_, nullptr, &pause);
  }
}

absl::Status Shim::WriteResultOfFailedExec() const {
  v1::RankResult result;
  result.set_reason(v1::REASON_SPAWN_FAILED);
  result.set_detail(fmt::format("cannot execute {}: {}", options_.program, std::strerror(exec_error_)));
  return spool::WriteProto(files_.ResultPath(spec_.rank()), result);
}

absl::Status Shim::WriteExit() const {
  v1::ExitRecord record;
  const int status = wait_status_.value_or(0);
  record.set_exit_code(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  record.set_signal(WIFSIGNALED(status) ? WTERMSIG(status) : 0);
  record.set_max_rss_bytes(max_rss_bytes_);
  *record.mutable_time() = spool::NowTimestamp();
  absl::Status written;
  for (int i = 0; i < kExitRecordTries; ++i) {
    if (i > 0) ::usleep(500'000);
    written = spool::WriteProto(files_.ExitPath(spec_.rank()), record);
    if (written.ok()) break;
  }
  return written;
}

absl::Status Shim::Run() {
  MB_RETURN_IF_ERROR(Prepare());
  MB_RETURN_IF_ERROR(Claim());
  const absl::Status spawned = Spawn();
  if (rank_pid_ <= 0) return spawned;
  WaitForRank();
  KillLeftovers();
  MB_RETURN_IF_ERROR(spawned);
  if (exec_error_ != 0) MB_RETURN_IF_ERROR(WriteResultOfFailedExec());
  return WriteExit();
}

}  // namespace

absl::Status RunRank(const ShimOptions& options) { return Shim(options).Run(); }

}  // namespace mbridge::shim
