// Child processes of the end-to-end tests: started by posix_spawn, output in files, never left behind.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

namespace mbridge::e2e {

using Seconds = std::chrono::duration<double>;

struct CommandResult {
  int exit_code = -1;  // -1 when a signal or the deadline ended the command.
  int signal = 0;
  bool timed_out = false;
  std::string out;  // Standard output.
  std::string err;  // Standard error.

  // Everything for a failure message.
  std::string Text() const;
};
inline void PrintTo(const CommandResult& result, std::ostream* out) { *out << result.Text(); }

struct SpawnOptions {
  std::map<std::string, std::string> environment;  // On top of the test's own.
  std::filesystem::path out_path;                  // Appended to; empty = /dev/null.
  std::filesystem::path err_path;
  std::filesystem::path directory;  // Working directory; empty = the test's own.
  std::string input;                // Standard input.
  bool new_session = false;
};

// A running child. The destructor kills (SIGKILL) and reaps it where it still runs.
class Process {
 public:
  Process() = default;
  Process(const std::vector<std::string>& arguments, const SpawnOptions& options);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  pid_t pid() const { return pid_; }
  bool running();
  void Signal(int signal);
  // True when the child ended within the time; its status is then in exit_code() or signal().
  bool Wait(Seconds timeout);
  int exit_code() const { return exit_code_; }
  int signal() const { return signal_; }

 private:
  bool Reap(bool block);

  pid_t pid_ = -1;
  bool ended_ = true;
  int exit_code_ = -1;
  int signal_ = 0;
};

// Runs a command to its end or to the deadline (then SIGKILL).
CommandResult RunCommand(const std::vector<std::string>& arguments, SpawnOptions options = {}, Seconds timeout = Seconds(60));

// Calls `condition` every few milliseconds until it holds; false at the deadline.
bool WaitUntil(const std::function<bool()>& condition, Seconds timeout);

std::string ReadFile(const std::filesystem::path& path);
void WriteFile(const std::filesystem::path& path, const std::string& text);

// Processes (not zombies) whose environment has `name=value`.
std::vector<pid_t> ProcessesWithEnvironment(const std::string& name, const std::string& value);
// Base name of the program, for example "mbrank"; empty when the process is gone.
std::string ProgramOf(pid_t pid);
std::string CommandLineOf(pid_t pid);

// A TCP port on loopback that was free a moment ago.
int FreePort();

}  // namespace mbridge::e2e
