// The data file of one rank, in the layout of safetensors: 8 bytes header length, a JSON header padded with spaces to a multiple
// of 8, the tensors without gaps.
#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"

namespace mbridge {

// Writes `tensors` to directory/name and syncs it. The result is a manifest with this file and its shards only. NAN_LOSS for a
// tensor that is not finite; the file is not whole then.
absl::StatusOr<Manifest> WriteShardFile(const std::string& directory, const std::string& name, const CheckpointMeta& meta,
                                        std::vector<const CheckpointTensor*> tensors);

}  // namespace mbridge
