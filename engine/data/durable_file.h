// A file that appears under its name only when complete and on disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge {

// Written beside its target as <name>.tmp.<pid>.<n>, then fsync, rename, fsync of the folder. An object that goes away
// before Commit() removes the temporary file. Not thread-safe.
class DurableFile {
 public:
  static absl::StatusOr<std::unique_ptr<DurableFile>> Create(const std::string& path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  absl::Status Append(const void* data, size_t bytes);
  // Writes what is buffered and syncs it; the file still has its temporary name.
  absl::Status Sync();
  // Sync(), then the final name.
  absl::Status Commit();
  int64_t size() const { return size_; }

 private:
  DurableFile() = default;
  absl::Status Write(const char* data, size_t bytes);
  absl::Status Failed(std::string_view action) const;

  std::string path_, temporary_;
  int fd_ = -1;
  int64_t size_ = 0;
  std::vector<char> buffer_;
};

// The whole of `content` as one durable file.
absl::Status WriteDurably(const std::string& path, std::string_view content);

}  // namespace mbridge
