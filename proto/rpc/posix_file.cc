#include "proto/rpc/posix_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "proto/rpc/status_details.h"

namespace mbridge {

absl::Status PosixStatus(int error_number, std::string_view what) {
  const std::string message = fmt::format("{}: {}", what, std::strerror(error_number));
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_DISK_FULL, message);
    case ENOENT:
    case ENOTDIR: return absl::NotFoundError(message);
    case EEXIST:
    case ENOTEMPTY: return absl::AlreadyExistsError(message);
    case EACCES:
    case EPERM:
    case EROFS: return absl::PermissionDeniedError(message);
    default: return absl::UnavailableError(message);
  }
}

absl::Status WriteToDescriptor(int descriptor, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return PosixStatus(errno, "cannot write " + path);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status SyncFolder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return PosixStatus(errno, "cannot open the folder " + path);
  const int result = fsync(descriptor), error_number = errno;
  close(descriptor);
  return result == 0 ? absl::OkStatus() : PosixStatus(error_number, "cannot sync the folder " + path);
}

std::string FolderOf(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return slash == 0 ? "/" : std::string(path.substr(0, slash));
}

}  // namespace mbridge
