// A directory that a conversion writes: built as the sibling `.tmp-<name>`, which gets its name by rename once everything is on
// the disk. A later conversion with the same fingerprint takes finished files over. One thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge {

class OutputDirectory {
 public:
  // `fingerprint`: of everything that the content depends on; a rest with another one is removed. ALREADY_EXISTS when `path`
  // does.
  static absl::StatusOr<OutputDirectory> Open(const std::string& path, const std::string& fingerprint);

  // Whether an earlier conversion finished this file.
  bool Has(const std::string& name) const;
  // Of the file while it is written; what an earlier conversion left there is removed.
  absl::StatusOr<std::string> Begin(const std::string& name) const;
  // The file, whole and synced, gets its name.
  absl::Status Finish(const std::string& name) const;
  // Of a file that is written at once.
  std::string PathOf(const std::string& name) const { return temporary_ + "/" + name; }
  // DISK_FULL when fewer bytes are free.
  absl::Status CheckRoom(int64_t bytes) const;
  // Makes it `path`, durably.
  absl::Status Commit() const;

 private:
  OutputDirectory(std::string path, std::string temporary) : path_(std::move(path)), temporary_(std::move(temporary)) {}
  std::string path_, temporary_;
};

}  // namespace mbridge
