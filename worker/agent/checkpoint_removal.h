// Removes a checkpoint directory from disk so that no crash leaves half a checkpoint under its name.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace mbridge::agent {

// Renames `path` to .trash-<name> beside it, then removes that. Bytes freed. A path that does not exist is a success (and
// ends an interrupted removal). INVALID_ARGUMENT for a path that is not absolute and normal, FAILED_PRECONDITION for one
// that is not a directory with manifest.json in it. Does not follow symbolic links.
absl::StatusOr<int64_t> RemoveCheckpoint(const std::string& path);

}  // namespace mbridge::agent
