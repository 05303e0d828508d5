#include "server/nodes/log_archive.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace mbridge::server {
namespace {

struct File {
  int fd = -1;
  ~File() {
    if (fd >= 0) close(fd);
  }
};

bool WriteAll(int fd, std::string_view data, int64_t offset) {
  while (!data.empty()) {
    const ssize_t written = pwrite(fd, data.data(), data.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    data.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
  return true;
}

}  // namespace

std::string LogArchive::Path(const std::string& job_id, int32_t attempt, int32_t rank) const {
  return fmt::format("{}/{}/{}/rank-{}.log", directory_, job_id, attempt, rank);
}

int64_t LogArchive::Size(const std::string& job_id, int32_t attempt, int32_t rank) const {
  struct stat info {};
  return stat(Path(job_id, attempt, rank).c_str(), &info) == 0 ? info.st_size : 0;
}

absl::Status LogArchive::Append(const std::string& job_id, int32_t attempt, const v1::LogChunk& chunk) const {
  const std::string path = Path(job_id, attempt, chunk.rank());
  const auto failed = [&path] { return absl::UnavailableError(fmt::format("{}: {}", path, std::strerror(errno))); };
  const int64_t size = Size(job_id, attempt, chunk.rank());
  std::string_view data = chunk.data();
  int64_t offset = chunk.offset();
  if (offset > size && chunk.dropped_bytes() < offset - size) return absl::OkStatus();
  if (offset < size) {
    const int64_t known = std::min<int64_t>(size - offset, static_cast<int64_t>(data.size()));
    data.remove_prefix(static_cast<size_t>(known));
    offset += known;
  }
  if (data.empty()) return absl::OkStatus();

  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  File file{open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)};
  if (file.fd < 0) return failed();
  if (offset > size) {
    std::string note =
        fmt::format("\n[{} bytes of this log were dropped: it grew faster than it could be shipped]\n", offset - size);
    note.resize(std::min<size_t>(note.size(), static_cast<size_t>(offset - size)));
    if (!WriteAll(file.fd, note, size)) return failed();
  }
  return WriteAll(file.fd, data, offset) ? absl::OkStatus() : failed();
}

absl::StatusOr<LogArchive::Piece> LogArchive::Read(const std::string& job_id, int32_t attempt, int32_t rank, int64_t offset,
                                                   size_t limit) const {
  const std::string path = Path(job_id, attempt, rank);
  Piece piece{.data = {}, .offset = offset};
  File file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) {
    if (errno == ENOENT) return piece;
    return absl::UnavailableError(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  // A gap is a hole in the file.
  const off_t start = lseek(file.fd, offset, SEEK_DATA);
  if (start < 0) return piece;
  piece.offset = start;
  piece.data.resize(limit);
  const ssize_t got = pread(file.fd, piece.data.data(), limit, start);
  if (got < 0) return absl::UnavailableError(fmt::format("{}: {}", path, std::strerror(errno)));
  piece.data.resize(static_cast<size_t>(got));
  // Holes are found by whole blocks only; the rest of one reads as NULs.
  const size_t first = piece.data.find_first_not_of('\0');
  if (first == std::string::npos) return Read(job_id, attempt, rank, start + got, limit);
  piece.offset += static_cast<int64_t>(first);
  const size_t end = piece.data.find('\0', first);
  piece.data = piece.data.substr(first, end == std::string::npos ? end : end - first);
  return piece;
}

}  // namespace mbridge::server
