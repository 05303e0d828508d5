#include "client/mbctl/rank_program.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "proto/rpc/status_details.h"

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

}  // namespace

std::string FindRankProgram() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const auto beside = self.parent_path() / "mbrank";
    if (access(beside.c_str(), X_OK) == 0) return beside;
  }
  return "mbrank";
}

absl::StatusOr<std::string> OutputOfRankProgram(const std::vector<std::string>& arguments) {
  const auto failed = [](const std::string& why) {
    return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_INVALID_REQUEST, why);
  };
  std::vector<std::string> words = {FindRankProgram()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  int ends[2];
  if (pipe(ends) != 0) return failed(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  pid_t child = 0;
  const int started = posix_spawnp(&child, pointers[0], &actions, nullptr, pointers.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (started != 0) {
    ::close(ends[0]);
    return failed(fmt::format("cannot start mbrank ({}); it must stand beside mbctl or in PATH", std::strerror(started)));
  }
  std::string output = ReadAll(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return output;
  return failed(fmt::format("mbrank {} failed; its message is above", fmt::join(arguments, " ")));
}

}  // namespace mbridge::mbctl
