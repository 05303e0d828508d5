#include "engine/data/durable_file.h"

#include <atomic>
#include <cerrno>
#include <cstdio>

#include <unistd.h>

#include <fmt/format.h>

#include "engine/data/data_status.h"

namespace mbridge {

constexpr size_t kBufferBytes = 1 << 20;

absl::StatusOr<std::unique_ptr<DurableFile>> DurableFile::Create(const std::string& path) {
  static std::atomic<int> counter = 0;
  std::string temporary = fmt::format("{}.tmp.{}.{}", path, getpid(), counter++);
  MB_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(temporary));
  return std::unique_ptr<DurableFile>(new DurableFile(path, std::move(temporary), std::move(file)));
}

DurableFile::DurableFile(std::string path, std::string temporary, FileWriter file)
    : path_(std::move(path)), temporary_(std::move(temporary)), file_(std::move(file)) {
  buffer_.reserve(kBufferBytes);
}

DurableFile::~DurableFile() {
  if (!committed_) unlink(temporary_.c_str());
}

absl::Status DurableFile::Flush() {
  MB_RETURN_IF_ERROR(file_.Write(buffer_.data(), buffer_.size()));
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status DurableFile::Append(const void* data, size_t bytes) {
  const char* begin = static_cast<const char*>(data);
  if (buffer_.size() + bytes > kBufferBytes) {
    MB_RETURN_IF_ERROR(Flush());
    if (bytes >= kBufferBytes) return file_.Write(begin, bytes);
  }
  buffer_.insert(buffer_.end(), begin, begin + bytes);
  return absl::OkStatus();
}

absl::Status DurableFile::Sync() {
  MB_RETURN_IF_ERROR(Flush());
  MB_RETURN_IF_ERROR(file_.SyncAndClose());
  synced_ = true;
  return absl::OkStatus();
}

absl::Status DurableFile::Commit() {
  if (!synced_) MB_RETURN_IF_ERROR(Sync());
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) return FileError(errno, "rename to", path_);
  committed_ = true;
  return SyncDirectory(ParentDirectory(path_));
}

}  // namespace mbridge
