#include "worker/spool/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include <fmt/format.h>
#include <google/protobuf/message_lite.h>

#include "proto/rpc/posix_file.h"
#include "proto/rpc/status_details.h"

namespace mbridge::spool {
namespace {

// A temporary file beside `path`; its name starts with ".tmp-", which readers of directories skip.
absl::StatusOr<std::string> WriteTemporary(const std::string& path, std::string_view bytes, bool sync) {
  static std::atomic<uint64_t> counter{0};
  const std::string temporary =
      fmt::format("{}/.tmp-{}-{}-{}", DirectoryOf(path), path.substr(path.rfind('/') + 1), ::getpid(), counter.fetch_add(1));
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoStatus(errno, "cannot create " + temporary);
  absl::Status status = WriteToDescriptor(fd, bytes, temporary);
  if (status.ok() && sync && ::fsync(fd) != 0) status = ErrnoStatus(errno, "cannot sync " + temporary);
  if (::close(fd) != 0 && status.ok()) status = ErrnoStatus(errno, "cannot close " + temporary);
  if (!status.ok()) {
    ::unlink(temporary.c_str());
    return status;
  }
  return temporary;
}

absl::Status Replace(const std::string& path, std::string_view bytes, bool sync) {
  MB_ASSIGN_OR_RETURN(const std::string temporary, WriteTemporary(path, bytes, sync));
  if (::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status status = ErrnoStatus(errno, "cannot replace " + path);
  ::unlink(temporary.c_str());
  return status;
}

absl::StatusOr<std::string> Serialize(const google::protobuf::MessageLite& message) {
  std::string bytes;
  if (!message.SerializeToString(&bytes)) return absl::InternalError("cannot serialize " + message.GetTypeName());
  return bytes;
}

}  // namespace

absl::Status ErrnoStatus(int error_number, std::string_view what) { return PosixStatus(error_number, what); }

std::string DirectoryOf(const std::string& path) { return FolderOf(path); }

absl::Status SyncDirectory(const std::string& path) { return SyncFolder(path); }

absl::Status WriteFileAtomically(const std::string& path, std::string_view bytes) {
  MB_RETURN_IF_ERROR(Replace(path, bytes, /*sync=*/true));
  return SyncDirectory(DirectoryOf(path));
}

absl::Status ReplaceFile(const std::string& path, std::string_view bytes) { return Replace(path, bytes, /*sync=*/false); }

absl::Status WriteFileExclusively(const std::string& path, std::string_view bytes) {
  MB_ASSIGN_OR_RETURN(const std::string temporary, WriteTemporary(path, bytes, /*sync=*/true));
  const int result = ::link(temporary.c_str(), path.c_str());
  const int error_number = errno;
  ::unlink(temporary.c_str());
  if (result != 0) return ErrnoStatus(error_number, "cannot create " + path);
  return SyncDirectory(DirectoryOf(path));
}

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "cannot open " + path);
  std::string bytes;
  char buffer[1 << 16];
  absl::Status status;
  while (true) {
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) status = ErrnoStatus(errno, "cannot read " + path);
    if (got <= 0) break;
    bytes.append(buffer, static_cast<size_t>(got));
    if (static_cast<int64_t>(bytes.size()) > max_bytes) {
      status = absl::ResourceExhaustedError(fmt::format("{} is larger than {} bytes", path, max_bytes));
      break;
    }
  }
  ::close(fd);
  if (!status.ok()) return status;
  return bytes;
}

absl::Status WriteProto(const std::string& path, const google::protobuf::MessageLite& message) {
  MB_ASSIGN_OR_RETURN(const std::string bytes, Serialize(message));
  return WriteFileAtomically(path, bytes);
}

absl::Status WriteProtoExclusively(const std::string& path, const google::protobuf::MessageLite& message) {
  MB_ASSIGN_OR_RETURN(const std::string bytes, Serialize(message));
  return WriteFileExclusively(path, bytes);
}

absl::Status ReadProto(const std::string& path, google::protobuf::MessageLite* message) {
  MB_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  if (message->ParseFromString(bytes)) return absl::OkStatus();
  return absl::DataLossError(fmt::format("{} is not a {}", path, message->GetTypeName()));
}

}  // namespace mbridge::spool
