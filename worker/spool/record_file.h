// The metric spool: an append-only file of RankRecord, written by rank 0 and followed by the agent.
//
// One record: magic "MBR1", payload length (both 32-bit little-endian), XXH3-64 of the payload seeded with its length,
// payload (binary RankRecord). A write that was cut short leaves a torn tail, which readers take for "not there yet"
// and the next writer removes; it never costs an earlier record. Damage in the middle is DATA_LOSS with its offset.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mbridge/v1/rank.pb.h"

namespace mbridge::spool {

// Larger records are refused by the writer and taken for damage by the reader.
inline constexpr uint32_t kMaxRecordBytes = 256u << 10;

// Thread-safe. One writer a file: Open takes a lock on it that ends with the process.
class RecordWriter {
 public:
  // Creates the file (mode 0600) or goes on behind its last whole record. FAILED_PRECONDITION while another writer has it.
  static absl::StatusOr<std::unique_ptr<RecordWriter>> Open(const std::string& path);
  ~RecordWriter();
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Sets `sequence` (the next one, without gap) and, where it is missing, `time`; writes the record with one system call.
  // Checkpoint and finished records are durable on return. On an error the record is dropped and counted, the file stays
  // whole, and the next success puts a message record with the count in front: training need not stop. Only an error of
  // the final sync leaves the record in the file.
  absl::Status Append(v1::RankRecord record);

  // Sequence of the last record in the file; 0: none.
  uint64_t last_sequence() const;
  // Records dropped so far, of which no message record told yet.
  int64_t dropped() const;

 private:
  RecordWriter(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status Recover();
  absl::Status WriteLocked(v1::RankRecord* record);

  const std::string path_;
  const int fd_;
  mutable std::mutex mutex_;
  uint64_t end_ = 0;
  uint64_t last_sequence_ = 0;
  int64_t dropped_ = 0;
  std::string first_drop_;  // Why the first of the dropped records was.
};

// Not thread-safe. May run while a writer appends, in another process.
class RecordReader {
 public:
  // `offset`: 0 or what offset() of an earlier reader returned. NOT_FOUND while there is no file.
  static absl::StatusOr<std::unique_ptr<RecordReader>> Open(const std::string& path, uint64_t offset = 0);
  ~RecordReader();
  RecordReader(const RecordReader&) = delete;
  RecordReader& operator=(const RecordReader&) = delete;

  // The next whole record; nullopt where there is none yet. DATA_LOSS names the damaged bytes, once each; the next call
  // goes on with the record behind them, if one follows that is whole.
  absl::StatusOr<std::optional<v1::RankRecord>> Next();

  // Behind the last record returned.
  uint64_t offset() const { return offset_; }

 private:
  RecordReader(std::string path, int fd, uint64_t offset) : path_(std::move(path)), fd_(fd), offset_(offset) {}

  const std::string path_;
  const int fd_;
  uint64_t offset_;
  uint64_t reported_damage_ = UINT64_MAX;  // Offset of a damaged tail that was reported already.
};

}  // namespace mbridge::spool
