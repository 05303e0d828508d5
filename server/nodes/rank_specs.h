// What the coordinator tells a rank, from job, attempt and source checkpoint.
#pragma once

#include <string>

#include "mbridge/v1/checkpoint.pb.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/rank.pb.h"

namespace mbridge::server {

// Where the job's new checkpoints go.
std::string CheckpointDirectory(const v1::Job& job);

// True where `path` is absolute, free of "..", and equal to or below `root`.
bool IsBeneath(const std::string& path, const std::string& root);

// The device that every rank of the attempt uses.
v1::Device DeviceOf(const v1::Attempt& attempt);

// attempt_directory is left to the agent. `source` null: from the seed.
v1::RankSpec MakeRankSpec(const v1::Job& job, const v1::Attempt& attempt, const v1::RankPlacement& place,
                          const v1::ResolvedConfig& resolved, const v1::Checkpoint* source, const std::string& build_id);

}  // namespace mbridge::server
