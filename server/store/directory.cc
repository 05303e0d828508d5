#include "server/store/directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "proto/rpc/status_details.h"

namespace mbridge::server {
namespace {

absl::Status FileError(const std::string& path) {
  const int error = errno;
  const std::string text = fmt::format("{}: {}", path, std::strerror(error));
  if (error == ENOSPC) return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_STORE_FULL, text);
  return absl::FailedPreconditionError(text);
}

std::string HolderOf(int fd) {
  char pid[32] = {};
  return pread(fd, pid, sizeof pid - 1, 0) > 0 ? fmt::format("process {}", pid) : "another process";
}

}  // namespace

absl::StatusOr<std::unique_ptr<DirectoryLock>> DirectoryLock::Acquire(const std::string& directory) {
  const std::string path = directory + "/owner";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return FileError(path);
  std::unique_ptr<DirectoryLock> lock(new DirectoryLock(fd));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return MakeStatus(
        absl::StatusCode::kFailedPrecondition, v1::REASON_STORE_LOCKED,
        fmt::format("{} is in use by {}; stop that coordinator or give this one another --state-dir", directory, HolderOf(fd)));
  }
  const std::string pid = std::to_string(getpid());
  // The pid only serves the message above; a full disk must not keep the lock from being taken.
  if (ftruncate(fd, 0) == 0 && pwrite(fd, pid.data(), pid.size(), 0) < 0) errno = 0;
  return lock;
}

DirectoryLock::~DirectoryLock() { close(fd_); }

absl::StatusOr<std::unique_ptr<AcknowledgedMark>> AcknowledgedMark::Open(const std::string& directory) {
  const std::string path = directory + "/acknowledged";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return FileError(path);
  std::array<uint64_t, 2> words{};
  const bool whole = pread(fd, words.data(), sizeof words, 0) == sizeof words && words[0] == ~words[1];
  return std::unique_ptr<AcknowledgedMark>(new AcknowledgedMark(fd, whole ? words[0] : 0));
}

AcknowledgedMark::~AcknowledgedMark() { close(fd_); }

void AcknowledgedMark::Set(uint64_t value) {
  const std::array<uint64_t, 2> words{value, ~value};
  // A failed write leaves the older value: a weaker check at the next open, never a wrong one.
  if (pwrite(fd_, words.data(), sizeof words, 0) == sizeof words) value_ = value;
}

}  // namespace mbridge::server
