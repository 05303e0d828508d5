#include "client/mbctl/rank_program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

extern char** environ;

namespace mbridge::mbctl {
namespace {

std::string ReadAll(int file) {
  std::string text;
  char buffer[4096];
  for (ssize_t read; (read = ::read(file, buffer, sizeof(buffer))) != 0;) {
    if (read > 0) text.append(buffer, static_cast<size_t>(read));
    if (read < 0 && errno != EINTR) break;
  }
  ::close(file);
  return text;
}

absl::Status CannotStart(const std::string& name, int error) {
  return absl::InvalidArgumentError(
      fmt::format("cannot start {} ({}); it must stand beside mbctl or in PATH", name, std::strerror(error)));
}

// For calls that take a C array of texts.
std::vector<char*> Pointers(std::vector<std::string>* texts) {
  std::vector<char*> pointers;
  for (std::string& text : *texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> CommandLine(const std::string& name, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {FindRankProgram(name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

// This process's environment with `more` in place of its own variables of those names.
std::vector<std::string> Environment(const std::vector<std::pair<std::string, std::string>>& more) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable = *entry;
    const bool replaced =
        std::any_of(more.begin(), more.end(), [&](const auto& other) { return variable.starts_with(other.first + "="); });
    if (!replaced) variables.push_back(variable);
  }
  for (const auto& [name, value] : more) variables.push_back(fmt::format("{}={}", name, value));
  return variables;
}

std::filesystem::path Beside(const std::string& name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::filesystem::path() : self.parent_path() / name;
}

}  // namespace

bool HasRankProgram(const std::string& name) { return access(Beside(name).c_str(), X_OK) == 0; }

std::string FindRankProgram(const std::string& name) { return HasRankProgram(name) ? Beside(name).string() : name; }

absl::Status BecomeRankProgram(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = CommandLine(kCpuRankProgram, arguments);
  const std::vector<char*> pointers = Pointers(&words);
  execvp(pointers[0], pointers.data());
  return CannotStart(kCpuRankProgram, errno);
}

absl::StatusOr<pid_t> StartRankProgram(const RankProgramStart& start) {
  std::vector<std::string> words = CommandLine(start.name, start.arguments);
  std::vector<std::string> variables = Environment(start.environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  if (start.out >= 0) posix_spawn_file_actions_adddup2(&actions, start.out, STDOUT_FILENO);
  if (start.err >= 0) posix_spawn_file_actions_adddup2(&actions, start.err, STDERR_FILENO);
  if (start.background) {
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // A group of its own.
  }
  pid_t child = 0;
  const int error =
      posix_spawnp(&child, words[0].c_str(), &actions, &attributes, Pointers(&words).data(), Pointers(&variables).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return CannotStart(start.name, error);
  return child;
}

absl::StatusOr<std::string> OutputOfRankProgram(const std::vector<std::string>& arguments) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::InvalidArgumentError(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  const auto child = StartRankProgram({.arguments = arguments, .out = ends[1]});
  ::close(ends[1]);
  if (!child.ok()) {
    ::close(ends[0]);
    return child.status();
  }
  std::string output = ReadAll(ends[0]);
  int status = 0;
  while (waitpid(*child, &status, 0) < 0 && errno == EINTR) {}
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return output;
  return absl::InvalidArgumentError(fmt::format("mbrank {} failed; its message is above", fmt::join(arguments, " ")));
}

}  // namespace mbridge::mbctl
