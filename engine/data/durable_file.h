// A large file that replaces its name only when complete and on disk (engine/core/file.h has the same for small contents).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/core/file.h"

namespace mbridge {

// Written beside its target as <name>.tmp.<pid>.<n>, buffered. An object that goes away before Commit() removes the temporary
// file. Not thread-safe. Errors as in engine/core/file.h.
class DurableFile {
 public:
  static absl::StatusOr<std::unique_ptr<DurableFile>> Create(const std::string& path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  absl::Status Append(const void* data, size_t bytes);
  // Everything on disk, still under the temporary name; nothing may be appended after.
  absl::Status Sync();
  // Sync() where that has not happened, then the final name, replacing what was there, and the folder synced.
  absl::Status Commit();

 private:
  DurableFile(std::string path, std::string temporary, FileWriter file);
  absl::Status Flush();

  std::string path_, temporary_;
  FileWriter file_;
  bool synced_ = false, committed_ = false;
  std::vector<char> buffer_;
};

}  // namespace mbridge
