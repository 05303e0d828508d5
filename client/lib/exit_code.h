// Exit codes of mbctl and of CI programs that use this library: one small table, documented in docs/mbctl.md.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace mbridge::v1 {
class StreamEnd;
class Job;
}  // namespace mbridge::v1

namespace mbridge::client {

enum ExitCode : int {
  kExitOk = 0,
  kExitJobFailed = 1,
  kExitInvalid = 2,
  kExitNotFound = 3,
  kExitPermission = 4,
  kExitCancelled = 5,
  kExitTimedOut = 6,
  kExitConnectionLost = 7,
  kExitRefused = 8,
  kExitDataLoss = 9,
  kExitInterrupted = 130,
};

struct ExitCodeHelp {
  int code;
  std::string meaning;
};
// All codes in ascending order.
const std::vector<ExitCodeHelp>& ExitCodes();

// Of a refused or failed call: the reason's code where the status has one, else by status code. 0 only for OK.
int ExitCodeOf(const absl::Status& status);
// Of a finished job. 0 only for SUCCEEDED, whatever the message says; a state that is not terminal gives 7.
int ExitCodeOf(const v1::StreamEnd& end);
int ExitCodeOf(const v1::Job& job);

}  // namespace mbridge::client
