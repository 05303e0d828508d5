// mbrank, which holds the engine: mbctl starts it for what needs no coordinator.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace mbridge::mbctl {

// mbrank in the directory of this program, else the one of PATH.
std::string FindRankProgram();

// Runs mbrank with these arguments and returns its standard output; its standard error stays the terminal's.
// FAILED_PRECONDITION when it cannot be started or fails.
absl::StatusOr<std::string> OutputOfRankProgram(const std::vector<std::string>& arguments);

}  // namespace mbridge::mbctl
