#include "worker/agent/checkpoint_removal.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"

namespace mbridge::agent {
namespace {

namespace fs = std::filesystem;

int64_t BytesBelow(const fs::path& directory) {
  int64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    std::error_code no_size;
    if (it->is_regular_file(no_size) && !it->is_symlink(no_size)) bytes += static_cast<int64_t>(it->file_size(no_size));
  }
  return bytes;
}

absl::StatusOr<int64_t> RemoveTrash(const fs::path& trash) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(trash, error))) return int64_t{0};
  const int64_t bytes = BytesBelow(trash);
  fs::remove_all(trash, error);
  if (error) return spool::ErrnoStatus(error.value(), "cannot remove " + trash.string());
  return bytes;
}

}  // namespace

absl::StatusOr<int64_t> RemoveCheckpoint(const std::string& path) {
  const fs::path directory(path);
  if (!directory.is_absolute() || directory.lexically_normal() != directory || directory.filename().empty() ||
      directory.parent_path() == directory.root_path()) {
    return absl::InvalidArgumentError(
        fmt::format("path {}: must be absolute, without \"..\" and not a top-level directory", path));
  }
  const fs::path trash = directory.parent_path() / (".trash-" + directory.filename().string());
  MB_ASSIGN_OR_RETURN(int64_t bytes, RemoveTrash(trash));
  std::error_code error;
  const fs::file_status status = fs::symlink_status(directory, error);
  if (status.type() == fs::file_type::not_found) return bytes;
  if (status.type() != fs::file_type::directory || !fs::is_regular_file(fs::symlink_status(directory / "manifest.json", error))) {
    return absl::FailedPreconditionError(fmt::format("{} is not a checkpoint directory: it has no manifest.json", path));
  }
  if (::rename(directory.c_str(), trash.c_str()) != 0) return spool::ErrnoStatus(errno, "cannot rename " + path);
  MB_RETURN_IF_ERROR(spool::SyncDirectory(directory.parent_path()));
  MB_ASSIGN_OR_RETURN(const int64_t freed, RemoveTrash(trash));
  return bytes + freed;
}

}  // namespace mbridge::agent
