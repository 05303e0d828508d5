// A whole file, memory-mapped read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace mbridge {

// Immutable and thread-safe. The file must not shrink while it is mapped (the kernel would end the process).
class MappedFile {
 public:
  // NOT_FOUND (REASON_DATA_NOT_FOUND) or the system's error, with the path.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const unsigned char* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t modified_ns() const { return modified_ns_; }  // Modification time since the epoch.
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;
  std::string path_;
  const unsigned char* data_ = nullptr;
  int64_t size_ = 0;
  int64_t modified_ns_ = 0;
};

}  // namespace mbridge
