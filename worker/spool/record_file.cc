#include "worker/spool/record_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"
#include "worker/spool/timestamp.h"

namespace mbridge::spool {
namespace {

constexpr uint32_t kMagic = 0x3152424d;  // "MBR1"
constexpr size_t kHeaderBytes = 16;

// Little-endian hosts only (x86-64, arm64), as the header is copied as it lies in memory.
struct Header {
  uint32_t magic;
  uint32_t length;
  uint64_t checksum;
};
static_assert(sizeof(Header) == kHeaderBytes);

uint64_t Checksum(const std::string& payload) { return XXH3_64bits_withSeed(payload.data(), payload.size(), payload.size()); }

// Up to `length` bytes at `offset`; fewer at the end of the file.
absl::StatusOr<std::string> ReadAt(int fd, uint64_t offset, size_t length, const std::string& path) {
  std::string bytes(length, '\0');
  size_t got = 0;
  while (got < length) {
    const ssize_t n = ::pread(fd, bytes.data() + got, length - got, static_cast<off_t>(offset + got));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "cannot read " + path);
    if (n == 0) break;
    got += static_cast<size_t>(n);
  }
  bytes.resize(got);
  return bytes;
}

enum class Found { kRecord, kIncomplete, kDamaged };

struct Parsed {
  Found found = Found::kIncomplete;
  v1::RankRecord record;
  uint64_t next = 0;  // Offset behind the record.
};

absl::StatusOr<Parsed> ParseAt(int fd, uint64_t offset, const std::string& path) {
  Parsed parsed;
  MB_ASSIGN_OR_RETURN(const std::string head, ReadAt(fd, offset, kHeaderBytes, path));
  if (head.empty()) return parsed;
  if (std::memcmp(head.data(), &kMagic, std::min(head.size(), sizeof(kMagic))) != 0) {
    parsed.found = Found::kDamaged;
    return parsed;
  }
  if (head.size() < kHeaderBytes) return parsed;
  Header header;
  std::memcpy(&header, head.data(), sizeof(header));
  if (header.length > kMaxRecordBytes) {
    parsed.found = Found::kDamaged;
    return parsed;
  }
  MB_ASSIGN_OR_RETURN(const std::string payload, ReadAt(fd, offset + kHeaderBytes, header.length, path));
  if (payload.size() < header.length) return parsed;
  const bool whole = Checksum(payload) == header.checksum && parsed.record.ParseFromString(payload);
  parsed.found = whole ? Found::kRecord : Found::kDamaged;
  parsed.next = offset + kHeaderBytes + header.length;
  return parsed;
}

// Offset of the first whole record behind `offset`; nullopt where none follows.
absl::StatusOr<std::optional<uint64_t>> FindRecordBehind(int fd, uint64_t offset, const std::string& path) {
  constexpr size_t kWindow = 1 << 16;
  const char* magic = reinterpret_cast<const char*>(&kMagic);
  for (uint64_t start = offset + 1;;) {
    MB_ASSIGN_OR_RETURN(const std::string window, ReadAt(fd, start, kWindow, path));
    for (size_t at = window.find(magic, 0, sizeof(kMagic)); at != std::string::npos;
         at = window.find(magic, at + 1, sizeof(kMagic))) {
      MB_ASSIGN_OR_RETURN(const Parsed parsed, ParseAt(fd, start + at, path));
      if (parsed.found == Found::kRecord) return std::optional<uint64_t>(start + at);
    }
    if (window.size() < kWindow) return std::optional<uint64_t>();
    start += kWindow - (sizeof(kMagic) - 1);
  }
}

// What lies at an offset, told apart with the help of what follows: a length beyond the end of the file is a torn tail
// only where no whole record comes after it.
struct Step {
  Parsed parsed;
  std::optional<uint64_t> resume;  // kDamaged: where to go on.
};

absl::StatusOr<Step> StepAt(int fd, uint64_t offset, const std::string& path) {
  Step step;
  MB_ASSIGN_OR_RETURN(step.parsed, ParseAt(fd, offset, path));
  if (step.parsed.found == Found::kRecord) return step;
  MB_ASSIGN_OR_RETURN(step.resume, FindRecordBehind(fd, offset, path));
  if (step.parsed.found == Found::kIncomplete && step.resume.has_value()) {
    // A live writer may have finished the record between the two looks.
    MB_ASSIGN_OR_RETURN(step.parsed, ParseAt(fd, offset, path));
    if (step.parsed.found == Found::kIncomplete) step.parsed.found = Found::kDamaged;
  }
  return step;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RecordWriter>> RecordWriter::Open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoStatus(errno, "cannot open " + path);
  std::unique_ptr<RecordWriter> writer(new RecordWriter(path, fd));
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return absl::FailedPreconditionError(path + " is being written by another process");
    return ErrnoStatus(errno, "cannot lock " + path);
  }
  MB_RETURN_IF_ERROR(writer->Recover());
  return writer;
}

RecordWriter::~RecordWriter() { ::close(fd_); }

absl::Status RecordWriter::Recover() {
  while (true) {
    MB_ASSIGN_OR_RETURN(const Step step, StepAt(fd_, end_, path_));
    if (step.parsed.found == Found::kRecord) {
      last_sequence_ = std::max<uint64_t>(last_sequence_, step.parsed.record.sequence());
      end_ = step.parsed.next;
    } else if (step.resume.has_value()) {
      end_ = *step.resume;  // The reader reports the damage; the records behind it stay.
    } else {
      break;
    }
  }
  if (::ftruncate(fd_, static_cast<off_t>(end_)) != 0) return ErrnoStatus(errno, "cannot truncate " + path_);
  return absl::OkStatus();
}

absl::Status RecordWriter::WriteLocked(v1::RankRecord* record) {
  record->set_sequence(last_sequence_ + 1);
  if (!record->has_time()) *record->mutable_time() = NowTimestamp();
  std::string payload;
  if (!record->SerializeToString(&payload) || payload.size() > kMaxRecordBytes) {
    return absl::InvalidArgumentError(
        fmt::format("a record of {} bytes does not fit; at most {}", record->ByteSizeLong(), kMaxRecordBytes));
  }
  const Header header{kMagic, static_cast<uint32_t>(payload.size()), Checksum(payload)};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += payload;
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::pwrite(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(end_ + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const absl::Status status = ErrnoStatus(errno, "cannot write " + path_);
      // Should this fail too, the next record overwrites the torn one.
      if (::ftruncate(fd_, static_cast<off_t>(end_)) != 0) return status;
      return status;
    }
    done += static_cast<size_t>(n);
  }
  end_ += bytes.size();
  ++last_sequence_;
  return absl::OkStatus();
}

absl::Status RecordWriter::Append(v1::RankRecord record) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status status;
  if (dropped_ > 0) {
    v1::RankRecord message;
    message.set_message(fmt::format("{} records were not written: {}", dropped_, first_drop_));
    status = WriteLocked(&message);
    if (status.ok()) dropped_ = 0;
  }
  if (status.ok()) status = WriteLocked(&record);
  if (!status.ok()) {
    if (dropped_++ == 0) first_drop_ = std::string(status.message());
    return status;
  }
  if ((record.has_checkpoint() || record.has_finished()) && ::fdatasync(fd_) != 0) {
    return ErrnoStatus(errno, "cannot sync " + path_);
  }
  return absl::OkStatus();
}

uint64_t RecordWriter::last_sequence() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_sequence_;
}

int64_t RecordWriter::dropped() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return dropped_;
}

absl::StatusOr<std::unique_ptr<RecordReader>> RecordReader::Open(const std::string& path, uint64_t offset) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "cannot open " + path);
  return std::unique_ptr<RecordReader>(new RecordReader(path, fd, offset));
}

RecordReader::~RecordReader() { ::close(fd_); }

absl::StatusOr<std::optional<v1::RankRecord>> RecordReader::Next() {
  MB_ASSIGN_OR_RETURN(Step step, StepAt(fd_, offset_, path_));
  if (step.parsed.found == Found::kRecord) {
    offset_ = step.parsed.next;
    return std::optional<v1::RankRecord>(std::move(step.parsed.record));
  }
  if (step.parsed.found == Found::kIncomplete) return std::optional<v1::RankRecord>();
  const uint64_t damaged = offset_;
  if (step.resume.has_value()) {
    offset_ = *step.resume;
    if (damaged != reported_damage_) {
      return absl::DataLossError(fmt::format("{}: bytes {} to {} are damaged", path_, damaged, offset_));
    }
    return Next();
  }
  if (damaged == reported_damage_) return std::optional<v1::RankRecord>();
  reported_damage_ = damaged;
  return absl::DataLossError(fmt::format("{}: the bytes from {} on are damaged", path_, damaged));
}

}  // namespace mbridge::spool
