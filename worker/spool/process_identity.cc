#include "worker/spool/process_identity.h"

#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"

namespace mbridge::spool {
namespace {

class PidFd {
 public:
  explicit PidFd(pid_t pid) : fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))), error_(errno) {}
  ~PidFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  PidFd(const PidFd&) = delete;
  PidFd& operator=(const PidFd&) = delete;

  bool ok() const { return fd_ >= 0; }
  int error_number() const { return error_; }
  int Send(int signal) const { return static_cast<int>(::syscall(SYS_pidfd_send_signal, fd_, signal, nullptr, 0)); }

 private:
  int fd_;
  int error_;
};

absl::Status Gone(pid_t pid) { return absl::NotFoundError(fmt::format("process {} is gone", pid)); }

}  // namespace

absl::StatusOr<std::string> CurrentBootId() {
  MB_ASSIGN_OR_RETURN(std::string id, ReadFile("/proc/sys/kernel/random/boot_id"));
  while (!id.empty() && id.back() == '\n') id.pop_back();
  return id;
}

absl::StatusOr<ProcessStat> StatOf(pid_t pid) {
  const absl::StatusOr<std::string> text = ReadFile(fmt::format("/proc/{}/stat", pid));
  if (!text.ok()) return Gone(pid);
  // The command name, field 2, may hold blanks and parentheses: the fields go on behind the last one.
  const size_t close = text->rfind(')');
  ProcessStat stat;
  unsigned long long start_ticks = 0;
  if (close == std::string::npos ||
      std::sscanf(text->c_str() + close + 1, " %c %d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  &stat.state, &stat.parent, &stat.group, &stat.session, &start_ticks) != 5) {
    return Gone(pid);
  }
  stat.start_ticks = start_ticks;
  return stat;
}

absl::StatusOr<ProcessIdentity> IdentityOf(pid_t pid) {
  MB_ASSIGN_OR_RETURN(std::string boot_id, CurrentBootId());
  MB_ASSIGN_OR_RETURN(const ProcessStat stat, StatOf(pid));
  return ProcessIdentity{std::move(boot_id), pid, stat.start_ticks};
}

bool IsAlive(const ProcessIdentity& process) {
  if (process.pid <= 0) return false;
  const absl::StatusOr<std::string> boot_id = CurrentBootId();
  if (!boot_id.ok() || *boot_id != process.boot_id) return false;
  const absl::StatusOr<ProcessStat> stat = StatOf(process.pid);
  return stat.ok() && stat->start_ticks == process.start_ticks && stat->state != 'Z' && stat->state != 'X';
}

absl::Status SignalProcess(const ProcessIdentity& process, int signal) {
  if (process.pid <= 0) return Gone(process.pid);
  const PidFd fd(process.pid);
  if (!fd.ok() && fd.error_number() != ESRCH && fd.error_number() != EINVAL) {
    return ErrnoStatus(fd.error_number(), fmt::format("cannot open process {}", process.pid));
  }
  // The check comes after the open: from here on the descriptor cannot mean another process.
  if (!fd.ok() || !IsAlive(process)) return Gone(process.pid);
  if (fd.Send(signal) == 0) return absl::OkStatus();
  if (errno == ESRCH) return Gone(process.pid);
  return ErrnoStatus(errno, fmt::format("cannot signal process {}", process.pid));
}

int KillSession(const ProcessIdentity& leader) {
  const absl::StatusOr<std::string> boot_id = CurrentBootId();
  if (leader.pid <= 0 || !boot_id.ok() || *boot_id != leader.boot_id) return 0;
  // A pid is not given out again while a session still carries it.
  const absl::StatusOr<ProcessStat> now = StatOf(leader.pid);
  if (now.ok() && now->start_ticks != leader.start_ticks) return 0;
  DIR* directory = ::opendir("/proc");
  if (directory == nullptr) return 0;
  int killed = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid <= 0 || pid == leader.pid) continue;
    const absl::StatusOr<ProcessStat> stat = StatOf(pid);
    if (!stat.ok() || stat->session != leader.pid || stat->start_ticks < leader.start_ticks || stat->state == 'Z') continue;
    if (SignalProcess({*boot_id, pid, stat->start_ticks}, SIGKILL).ok()) ++killed;
  }
  ::closedir(directory);
  return killed;
}

}  // namespace mbridge::spool
