// Whole files, replaced atomically: the only way in which processes of a node hand each other state.
//
// A reader sees the old or the new content, never a mixture, also after a power cut. Errors are absl::Status with the
// path in the message: NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED with REASON_DISK_FULL (no space,
// quota, size limit), DATA_LOSS for content that does not parse, UNAVAILABLE for other I/O errors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace google::protobuf {
class MessageLite;
}

namespace mbridge::spool {

// The status of a failed system call; `what` says what was tried on which path.
absl::Status ErrnoStatus(int error_number, std::string_view what);

// Writes a temporary file beside `path`, syncs, renames, syncs the directory. Mode 0600.
absl::Status WriteFileAtomically(const std::string& path, std::string_view bytes);

// The same without the syncs: atomic for readers, but a power cut may lose it. For what a reboot makes worthless anyway.
absl::Status ReplaceFile(const std::string& path, std::string_view bytes);

// As WriteFileAtomically, but ALREADY_EXISTS where `path` exists: of several writers exactly one succeeds.
absl::Status WriteFileExclusively(const std::string& path, std::string_view bytes);

// The whole file; RESOURCE_EXHAUSTED beyond `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes = int64_t{64} << 20);

// The same for one message in binary form.
absl::Status WriteProto(const std::string& path, const google::protobuf::MessageLite& message);
absl::Status WriteProtoExclusively(const std::string& path, const google::protobuf::MessageLite& message);
absl::Status ReadProto(const std::string& path, google::protobuf::MessageLite* message);

// Makes entries of a directory (created, renamed, removed) durable.
absl::Status SyncDirectory(const std::string& path);

// "." for a path without a slash.
std::string DirectoryOf(const std::string& path);

}  // namespace mbridge::spool
