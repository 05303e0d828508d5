// mbrank and mbrank-cuda, which hold the engine: mbctl starts them for what needs no coordinator.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace mbridge::mbctl {

// Of mbctl's own directory, where they stand beside each other; else the bare name, which is looked for in PATH.
inline constexpr const char* kCpuRankProgram = "mbrank";
inline constexpr const char* kCudaRankProgram = "mbrank-cuda";
std::string FindRankProgram(const std::string& name = kCpuRankProgram);
// True where the program stands beside mbctl.
bool HasRankProgram(const std::string& name);

// mbrank with these arguments in place of this process. Returns only where that fails.
absl::Status BecomeRankProgram(const std::vector<std::string>& arguments);

// What a started rank program gets beside its arguments.
struct RankProgramStart {
  std::string name = kCpuRankProgram;
  std::vector<std::string> arguments = {};
  int out = -1, err = -1;                                             // Open files for its output; -1: this process's.
  std::vector<std::pair<std::string, std::string>> environment = {};  // On top of this process's.
  bool background = false;                                            // No standard input, and Ctrl-C does not reach it.
};
// The process. INVALID_ARGUMENT when it cannot be started.
absl::StatusOr<pid_t> StartRankProgram(const RankProgramStart& start);

// Runs mbrank with these arguments and returns its standard output; its standard error stays the terminal's.
// INVALID_ARGUMENT when it cannot be started or fails.
absl::StatusOr<std::string> OutputOfRankProgram(const std::vector<std::string>& arguments);

}  // namespace mbridge::mbctl
