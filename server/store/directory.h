// The files beside RocksDB's own: who has the store open, and how far acknowledged writes went.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace mbridge::server {

// Holds `<directory>/owner` with flock; released at destruction or death of the process.
class DirectoryLock {
 public:
  // FAILED_PRECONDITION STORE_LOCKED names the pid that holds it.
  static absl::StatusOr<std::unique_ptr<DirectoryLock>> Acquire(const std::string& directory);
  ~DirectoryLock();

 private:
  explicit DirectoryLock(int fd) : fd_(fd) {}
  int fd_;
};

// The sequence number of the last acknowledged write, in `<directory>/acknowledged`. It is written after the write
// became durable and never synced itself: kill -9 keeps it, a power cut may leave an older value, and both are true.
class AcknowledgedMark {
 public:
  static absl::StatusOr<std::unique_ptr<AcknowledgedMark>> Open(const std::string& directory);
  ~AcknowledgedMark();
  uint64_t value() const { return value_; }  // As found by Open, then as set.
  void Set(uint64_t value);

 private:
  AcknowledgedMark(int fd, uint64_t value) : fd_(fd), value_(value) {}
  int fd_;
  uint64_t value_;
};

}  // namespace mbridge::server
