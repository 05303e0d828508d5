#include "engine/core/file.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "engine/core/failpoint.h"
#include "proto/rpc/posix_file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

absl::Status FileError(int error_number, std::string_view verb, const std::string& path) {
  return PosixStatus(error_number, fmt::format("cannot {} {}", verb, path));
}

absl::StatusOr<FileWriter> FileWriter::Create(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(errno, "create", path);
  return FileWriter(fd, path);
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), bytes_written_(other.bytes_written_) {}

FileWriter::~FileWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::Status FileWriter::Write(const void* data, size_t bytes) {
  std::string_view rest(static_cast<const char*>(data), bytes);
  while (!rest.empty()) {
    if (const int injected = MB_FAILPOINT("file.write"); injected != 0) return FileError(injected, "write", path_);
    const std::string_view chunk = rest.substr(0, size_t{64} << 20);
    MB_RETURN_IF_ERROR(WriteToDescriptor(fd_, chunk, path_));
    rest.remove_prefix(chunk.size());
    bytes_written_ += static_cast<int64_t>(chunk.size());
  }
  return absl::OkStatus();
}

absl::Status FileWriter::SyncAndClose() {
  if (const int injected = MB_FAILPOINT("file.sync"); injected != 0) return FileError(injected, "sync", path_);
  if (fsync(fd_) != 0) return FileError(errno, "sync", path_);
  if (close(std::exchange(fd_, -1)) != 0) return FileError(errno, "close", path_);
  return absl::OkStatus();
}

absl::StatusOr<FileReader> FileReader::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, "open", path);
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    const int error_number = S_ISDIR(info.st_mode) ? EISDIR : errno;
    close(fd);
    return FileError(error_number, "read", path);
  }
  return FileReader(fd, path, info.st_size);
}

FileReader::FileReader(FileReader&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), size_(other.size_) {}

FileReader::~FileReader() {
  if (fd_ >= 0) close(fd_);
}

absl::Status FileReader::ReadAt(int64_t offset, void* data, size_t bytes) const {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = pread(fd_, next, std::min<size_t>(bytes, size_t{1} << 30), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(errno, "read", path_);
    if (got == 0) return absl::DataLossError(fmt::format("{} ends at byte {}, {} more were expected", path_, offset, bytes));
    next += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t max_bytes) {
  MB_ASSIGN_OR_RETURN(const FileReader reader, FileReader::Open(path));
  if (reader.size() > max_bytes) {
    return absl::ResourceExhaustedError(fmt::format("{} has {} bytes, at most {} are read", path, reader.size(), max_bytes));
  }
  std::string content(static_cast<size_t>(reader.size()), '\0');
  MB_RETURN_IF_ERROR(reader.ReadAt(0, content.data(), content.size()));
  return content;
}

absl::Status WriteFileDurably(const std::string& path, std::string_view content) {
  const std::string temporary = fmt::format("{}.tmp-{}", path, getpid());
  MB_RETURN_IF_ERROR(RemoveAll(temporary));
  absl::Status written = [&]() -> absl::Status {
    MB_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(temporary));
    MB_RETURN_IF_ERROR(writer.Write(content));
    MB_RETURN_IF_ERROR(writer.SyncAndClose());
    if (rename(temporary.c_str(), path.c_str()) != 0) return FileError(errno, "replace", path);
    return SyncDirectory(ParentDirectory(path));
  }();
  if (!written.ok()) unlink(temporary.c_str());
  return written;
}

absl::Status RenameDurably(const std::string& from, const std::string& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) != 0) {
    // Some network file systems lack the flag; the check before is then only as good as one writer a folder.
    if (errno != EINVAL && errno != ENOSYS) return FileError(errno, "rename to", to);
    if (access(to.c_str(), F_OK) == 0) return FileError(EEXIST, "rename to", to);
    if (rename(from.c_str(), to.c_str()) != 0) return FileError(errno, "rename to", to);
  }
  absl::Status synced = SyncDirectory(ParentDirectory(to));
  if (!synced.ok() && rename(to.c_str(), from.c_str()) != 0) return FileError(errno, "move back", to);
  return synced;
}

absl::Status SyncDirectory(const std::string& path) { return SyncFolder(path); }

absl::Status MakeDirectories(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0) return SyncDirectory(ParentDirectory(path));
  if (errno == EEXIST && std::filesystem::is_directory(path)) return absl::OkStatus();
  if (errno != ENOENT) return FileError(errno, "create the folder", path);
  const std::string parent = ParentDirectory(path);
  if (parent == path) return FileError(ENOENT, "create the folder", path);
  MB_RETURN_IF_ERROR(MakeDirectories(parent));
  if (mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return FileError(errno, "create the folder", path);
  return SyncDirectory(parent);
}

absl::Status RemoveAll(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  return error ? FileError(error.value(), "remove", path) : absl::OkStatus();
}

absl::StatusOr<int64_t> FreeDiskBytes(const std::string& path) {
  struct statvfs info {};
  if (statvfs(path.c_str(), &info) != 0) return FileError(errno, "ask for the free space of", path);
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

std::string ParentDirectory(const std::string& path) { return FolderOf(path); }

}  // namespace mbridge
