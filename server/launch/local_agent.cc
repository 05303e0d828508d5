#include "server/launch/local_agent.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

extern char** environ;

namespace mbridge::server {
namespace {

// Signals as a program expects them at its start, in its own session.
class SpawnAttributes {
 public:
  SpawnAttributes() {
    posix_spawnattr_init(&attributes_);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnAttributes() { posix_spawnattr_destroy(&attributes_); }
  const posix_spawnattr_t* get() const { return &attributes_; }

 private:
  posix_spawnattr_t attributes_;
};

}  // namespace

bool LocalAgentRuns(const std::string& directory) {
  const int fd = open((directory + "/agent.lock").c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  const bool held = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  close(fd);
  return held;
}

absl::StatusOr<pid_t> StartLocalAgent(const LocalAgentOptions& options) {
  if (LocalAgentRuns(options.directory)) {
    spdlog::info("the local agent runs already and is adopted");
    return 0;
  }
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(options.directory, error);
  const fs::path beside = fs::read_symlink("/proc/self/exe", error).parent_path() / "mbagent";
  const std::string program = options.program.empty() ? beside.string() : options.program;
  if (access(program.c_str(), X_OK) != 0) {
    return absl::FailedPreconditionError(fmt::format(
        "{} is not an executable program; name the agent with --agent-program, or start none with --no-local-agent", program));
  }
  const std::string log = options.directory + "/agent.log";
  const char* argv[] = {program.c_str(), "--coordinator",           options.coordinator.c_str(),
                        "--state-dir",   options.directory.c_str(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t pid = 0;
  const SpawnAttributes attributes;
  const int failed = posix_spawn(&pid, program.c_str(), &actions, attributes.get(), const_cast<char**>(argv), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return absl::InternalError(fmt::format("{}: {}", program, std::strerror(failed)));
  spdlog::info("started the local agent (process {}, log {})", pid, log);
  return pid;
}

}  // namespace mbridge::server
