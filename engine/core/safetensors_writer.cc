#include "engine/core/safetensors_writer.h"

#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "engine/core/failpoint.h"
#include "engine/core/file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr size_t kMaxWrite = size_t{64} << 20;

absl::Status WriteAt(int fd, const std::string& path, int64_t offset, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    if (const int injected = MB_FAILPOINT("file.write"); injected != 0) return FileError(injected, "write", path);
    const ssize_t written = pwrite(fd, next, std::min(bytes, kMaxWrite), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "write", path);
    next += written;
    offset += written;
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

}  // namespace

std::string SafetensorsHeader(const std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    header.emplace(tensor.name,
                   nlohmann::ordered_json{
                       {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes}}});
    offset += tensor.bytes;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string prefixed(sizeof(length), '\0');
  std::memcpy(prefixed.data(), &length, sizeof(length));
  return prefixed + text;
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(const std::string& path, std::vector<SafetensorsTensor> tensors,
                                                            const std::map<std::string, std::string>& metadata) {
  std::set<std::string> names;
  for (const SafetensorsTensor& tensor : tensors) {
    if (names.insert(tensor.name).second) continue;
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_ENGINE_ERROR,
                      fmt::format("{}: tensor {} would stand twice", path, tensor.name));
  }
  std::string header = SafetensorsHeader(tensors, metadata);
  if (header.size() > kMaxHeaderBytes) {
    return MakeStatus(
        absl::StatusCode::kInvalidArgument, v1::REASON_CHECKPOINT_IO_ERROR,
        fmt::format("the header of {} would have {} bytes, at most {} are readable", path, header.size(), kMaxHeaderBytes));
  }
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(errno, "create", path);
  SafetensorsWriter writer(fd, path, std::move(header), std::move(tensors));
  MB_RETURN_IF_ERROR(WriteAt(fd, path, 0, writer.header_.data(), writer.header_.size()));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(int fd, std::string path, std::string header, std::vector<SafetensorsTensor> tensors)
    : fd_(fd), path_(std::move(path)), header_(std::move(header)), tensors_(std::move(tensors)) {
  file_bytes_ = written_ = static_cast<int64_t>(header_.size());
  for (const SafetensorsTensor& tensor : tensors_) {
    offsets_.push_back(file_bytes_);
    file_bytes_ += tensor.bytes;
  }
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      header_(std::move(other.header_)),
      tensors_(std::move(other.tensors_)),
      offsets_(std::move(other.offsets_)),
      file_bytes_(other.file_bytes_),
      written_(other.written_) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsWriter::Write(size_t index, int64_t offset, const void* data, size_t bytes) {
  if (offset < 0 || offset + static_cast<int64_t>(bytes) > tensors_[index].bytes) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
                      fmt::format("{}: {} bytes at {} of tensor {} of {} bytes", path_, bytes, offset, tensors_[index].name,
                                  tensors_[index].bytes));
  }
  written_ += static_cast<int64_t>(bytes);
  return WriteAt(fd_, path_, offsets_[index] + offset, data, bytes);
}

absl::Status SafetensorsWriter::Finish() {
  if (written_ != file_bytes_) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
                      fmt::format("{}: {} of {} bytes were written", path_, written_, file_bytes_));
  }
  if (const int injected = MB_FAILPOINT("file.sync"); injected != 0) return FileError(injected, "sync", path_);
  if (fsync(fd_) != 0) return FileError(errno, "sync", path_);
  if (close(std::exchange(fd_, -1)) != 0) return FileError(errno, "close", path_);
  return absl::OkStatus();
}

}  // namespace mbridge
