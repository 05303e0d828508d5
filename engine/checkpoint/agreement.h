// Shares outcomes between the ranks of a save or a load, so that none goes on or waits when another has failed.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/comm/communicator.h"

namespace mbridge {

// The error of the lowest rank that has one, with its message, on every rank; OK if all are. Collective.
absl::Status Agree(const absl::Status& mine, Communicator* world);

// Every rank's text, in rank order. Collective.
std::vector<std::string> GatherTexts(const std::string& mine, Communicator* world);

}  // namespace mbridge
