// What the file layers of the engine (engine/core/file.h) and of the node (worker/spool/file.h) are built from: system calls with
// their faults as statuses.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace mbridge {

// "<what>: No space left on device". NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED with reason DISK_FULL (no
// space, quota, size limit), UNAVAILABLE for every other fault.
absl::Status PosixStatus(int error_number, std::string_view what);

// All of the bytes, in as many calls as it takes; `path` is for the message.
absl::Status WriteToDescriptor(int descriptor, std::string_view bytes, const std::string& path);

// Makes entries of a folder (created, renamed, removed) durable.
absl::Status SyncFolder(const std::string& path);

// The folder that holds `path`, which may end in a slash: "." for a name alone, "/" for the root and what is in it.
std::string FolderOf(std::string_view path);

}  // namespace mbridge
