// The process between agent and rank: starts one rank, outlives the agent, and leaves a record of how the rank ended.
//
// The rank dies with its shim (SIGKILL), so that a rank without a witness does not exist; what the rank leaves running is
// killed before the exit record is written. Single-threaded, no gRPC: forking is safe here and costs little memory.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace mbridge::shim {

struct ShimOptions {
  std::string spec_path;  // <attempt directory>/rank-<r>.spec; all other files lie beside it.
  std::string program;    // Executed as `program --spec <spec_path>`.
};

// Runs one rank to its end and writes rank-<r>.exit. Changes the calling process: new session, standard output and error
// into rank-<r>.log, no other descriptors. ALREADY_EXISTS when another shim has the rank or it must never start.
absl::Status RunRank(const ShimOptions& options);

}  // namespace mbridge::shim
