// Writes a safetensors file whose tensors are known before their bytes: header first, then the bytes at any place and in any
// order. One thread an object.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // The format's word.
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// 8 bytes of little-endian length and the JSON header, padded with spaces to a multiple of 8; the tensors' bytes follow each
// other in the order given.
std::string SafetensorsHeader(const std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata);

class SafetensorsWriter {
 public:
  static constexpr size_t kMaxHeaderBytes = 100'000'000;  // The format's limit.

  // Creates the file; it must not exist. INVALID_ARGUMENT when a name stands twice or the header is above the limit.
  static absl::StatusOr<SafetensorsWriter> Create(const std::string& path, std::vector<SafetensorsTensor> tensors,
                                                  const std::map<std::string, std::string>& metadata);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  // `bytes` of tensor `index` from its byte `offset` on. Every byte is written exactly once.
  absl::Status Write(size_t index, int64_t offset, const void* data, size_t bytes);
  // INTERNAL when bytes are missing; then everything is on the disk and the file closed.
  absl::Status Finish();

  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  int64_t OffsetOf(size_t index) const { return offsets_[index]; }  // In the file.
  const std::string& header() const { return header_; }
  int64_t file_bytes() const { return file_bytes_; }

 private:
  SafetensorsWriter(int fd, std::string path, std::string header, std::vector<SafetensorsTensor> tensors);
  int fd_;
  std::string path_, header_;
  std::vector<SafetensorsTensor> tensors_;
  std::vector<int64_t> offsets_;
  int64_t file_bytes_ = 0, written_ = 0;
};

}  // namespace mbridge
