#include "worker/agent/children.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "worker/spool/file.h"

namespace mbridge::agent {
namespace {

class SpawnSettings {
 public:
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawnattr_init(&attributes_);
    sigset_t none;
    sigset_t defaults;
    ::sigemptyset(&none);
    ::sigemptyset(&defaults);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGCHLD}) ::sigaddset(&defaults, signal);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &defaults);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  void Open(int fd, const std::string& path, int flags) {
    ::posix_spawn_file_actions_addopen(&actions_, fd, path.c_str(), flags, 0600);
  }
  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

}  // namespace

absl::StatusOr<pid_t> Children::Spawn(const ChildSpec& spec) {
  constexpr int kAppend = O_WRONLY | O_CREAT | O_APPEND;
  SpawnSettings settings;
  settings.Open(0, "/dev/null", O_RDONLY);
  settings.Open(1, spec.output_path, kAppend);
  settings.Open(2, spec.error_path, kAppend);
  std::vector<char*> arguments;
  for (const std::string& argument : spec.arguments) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t pid = 0;
  const int error_number =
      ::posix_spawn(&pid, arguments[0], settings.actions(), settings.attributes(), arguments.data(), environ);
  if (error_number != 0) return spool::ErrnoStatus(error_number, "cannot start " + spec.arguments[0]);
  running_.insert(pid);
  return pid;
}

void Children::Reap() {
  while (true) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid <= 0) return;
    if (running_.erase(pid) > 0) ended_[pid] = status;
  }
}

std::optional<int> Children::TakeEnd(pid_t pid) {
  const auto it = ended_.find(pid);
  if (it == ended_.end()) return std::nullopt;
  const int status = it->second;
  ended_.erase(it);
  return status;
}

}  // namespace mbridge::agent
