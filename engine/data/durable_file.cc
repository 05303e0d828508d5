#include "engine/data/durable_file.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "engine/data/data_status.h"

namespace mbridge {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

absl::Status SyncFolderOf(const std::string& path) {
  std::string folder = std::filesystem::path(path).parent_path().string();
  if (folder.empty()) folder = ".";
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (ok) return absl::OkStatus();
  return DataError(absl::StatusCode::kUnavailable, fmt::format("{}: fsync failed: {}", folder, std::strerror(error)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DurableFile>> DurableFile::Create(const std::string& path) {
  static std::atomic<int> counter = 0;
  std::unique_ptr<DurableFile> file(new DurableFile);
  file->path_ = path;
  file->temporary_ = fmt::format("{}.tmp.{}.{}", path, getpid(), counter++);
  file->fd_ = open(file->temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file->fd_ < 0) return file->Failed("create");
  file->buffer_.reserve(kBufferBytes);
  return file;
}

DurableFile::~DurableFile() {
  if (fd_ >= 0) {
    close(fd_);
    unlink(temporary_.c_str());
  }
}

absl::Status DurableFile::Failed(std::string_view action) const {
  const int error = errno;
  const auto code = error == ENOSPC || error == EDQUOT ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable;
  return DataError(code, fmt::format("{}: {} failed: {}", path_, action, std::strerror(error)));
}

absl::Status DurableFile::Write(const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(fd_, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Failed("write");
    data += written;
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

absl::Status DurableFile::Append(const void* data, size_t bytes) {
  size_ += static_cast<int64_t>(bytes);
  const char* begin = static_cast<const char*>(data);
  if (buffer_.size() + bytes > kBufferBytes) {
    MB_RETURN_IF_ERROR(Write(buffer_.data(), buffer_.size()));
    buffer_.clear();
    if (bytes >= kBufferBytes) return Write(begin, bytes);
  }
  buffer_.insert(buffer_.end(), begin, begin + bytes);
  return absl::OkStatus();
}

absl::Status DurableFile::Sync() {
  MB_RETURN_IF_ERROR(Write(buffer_.data(), buffer_.size()));
  buffer_.clear();
  return fsync(fd_) == 0 ? absl::OkStatus() : Failed("fsync");
}

absl::Status DurableFile::Commit() {
  MB_RETURN_IF_ERROR(Sync());
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("rename");
  close(fd_);
  fd_ = -1;
  return SyncFolderOf(path_);
}

absl::Status WriteDurably(const std::string& path, std::string_view content) {
  MB_ASSIGN_OR_RETURN(auto file, DurableFile::Create(path));
  MB_RETURN_IF_ERROR(file->Append(content.data(), content.size()));
  return file->Commit();
}

}  // namespace mbridge
