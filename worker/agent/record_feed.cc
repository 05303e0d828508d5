#include "worker/agent/record_feed.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

namespace mbridge::agent {
namespace {

constexpr int64_t kLogChunk = 128 << 10;
constexpr int64_t kLogKept = 256 << 20;
constexpr int64_t kLogBehind = 8 << 20;  // Farther behind than this, the middle of a log is skipped.

}  // namespace

void RecordFeed::Acknowledge(uint64_t sequence) {
  if (sequence < acknowledged_) {
    reader_.reset();
    pending_.clear();
    pending_bytes_ = 0;
    last_read_ = 0;
  }
  acknowledged_once_ = true;
  acknowledged_ = sequence;
  while (!pending_.empty() && pending_.front().sequence() <= sequence) {
    pending_bytes_ -= static_cast<int64_t>(pending_.front().ByteSizeLong());
    pending_.pop_front();
  }
}

void RecordFeed::Push(v1::RankRecord record) {
  last_read_ = record.sequence();
  if (record.sequence() <= acknowledged_) return;
  pending_bytes_ += static_cast<int64_t>(record.ByteSizeLong());
  pending_.push_back(std::move(record));
}

void RecordFeed::ReadAhead(int64_t bytes) {
  at_end_ = false;
  if (reader_ == nullptr) {
    auto reader = spool::RecordReader::Open(path_);
    if (!reader.ok()) {
      at_end_ = true;  // No rank has written yet, or none ever will.
      return;
    }
    reader_ = *std::move(reader);
  }
  while (pending_bytes_ < bytes) {
    auto record = reader_->Next();
    if (!record.ok()) {
      spdlog::error("{}", std::string(record.status().message()));
      if (absl::IsDataLoss(record.status())) continue;
      return;
    }
    if (!record->has_value()) {
      at_end_ = true;
      return;
    }
    // The coordinator acknowledges without gap, so each lost record needs a place.
    for (uint64_t lost = last_read_ + 1; lost < (*record)->sequence(); ++lost) {
      v1::RankRecord stand_in;
      stand_in.set_sequence(lost);
      *stand_in.mutable_time() = (*record)->time();
      stand_in.set_message("the record was lost: the metric spool is damaged");
      Push(std::move(stand_in));
    }
    if ((*record)->sequence() > last_read_) Push(**std::move(record));
  }
}

bool RecordFeed::Fill(v1::AttemptReport* report, Budget* budget) {
  if (!acknowledged_once_) return false;
  ReadAhead(budget->records);
  for (const v1::RankRecord& record : pending_) {
    if (budget->records <= 0) return false;
    budget->records -= static_cast<int64_t>(record.ByteSizeLong());
    *report->add_records() = record;
  }
  return at_end_;
}

void LogFeed::Acknowledge(int64_t offset) {
  acknowledged_once_ = true;
  acknowledged_ = offset;
}

void LogFeed::FreeOldBlocks(int64_t size) {
  const int64_t end = std::min(acknowledged_, size) - kLogKept;
  if (end - freed_ < kLogKept / 4) return;
  freed_ = end;
  const int fd = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  // Not every file system can; then the log stays whole.
  if (::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, end) != 0) spdlog::debug("{} cannot be trimmed", path_);
  ::close(fd);
}

bool LogFeed::Fill(v1::AttemptReport* report, Budget* budget) {
  if (!acknowledged_once_) return false;
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;
  struct stat info {};
  const int64_t size = ::fstat(fd, &info) == 0 ? info.st_size : 0;
  const int64_t offset = size - acknowledged_ > kLogBehind ? size - kLogChunk : acknowledged_;
  const int64_t length = std::min({size - offset, kLogChunk, budget->logs});
  int64_t got = 0;
  if (length > 0) {
    std::string data(static_cast<size_t>(length), '\0');
    got = std::max<int64_t>(::pread(fd, data.data(), data.size(), offset), 0);
    data.resize(static_cast<size_t>(got));
    if (got > 0) {
      v1::LogChunk* chunk = report->add_logs();
      chunk->set_rank(rank_);
      chunk->set_offset(offset);
      chunk->set_data(std::move(data));
      chunk->set_dropped_bytes(offset - acknowledged_);
      budget->logs -= got;
    }
  }
  ::close(fd);
  FreeOldBlocks(size);
  return offset + got >= size;
}

void RendezvousRelay::Fill(v1::AttemptReport* report, Budget* budget) {
  in_flight_.clear();
  auto directory = spool::RendezvousDirectory::Open(path_);
  if (!directory.ok()) return;
  const auto keys = directory->Keys();
  if (!keys.ok()) return;
  for (const std::string& key : *keys) {
    if (foreign_.count(key) > 0 || delivered_.count(key) > 0 || budget->records <= 0) continue;
    auto value = directory->Get(key);
    if (!value.ok() || !value->has_value()) continue;
    budget->records -= static_cast<int64_t>(key.size() + (*value)->size());
    v1::RendezvousEntry* entry = report->add_rendezvous();
    entry->set_key(key);
    entry->set_value(**std::move(value));
    in_flight_.insert(key);
  }
}

void RendezvousRelay::Delivered() {
  delivered_.merge(in_flight_);
  in_flight_.clear();
}

void RendezvousRelay::SendAllAgain() { delivered_.clear(); }

void RendezvousRelay::Store(const v1::AttemptOrder& order) {
  if (order.rendezvous().empty()) return;
  auto directory = spool::RendezvousDirectory::Open(path_);
  if (!directory.ok()) return;
  for (const v1::RendezvousEntry& entry : order.rendezvous()) {
    if (foreign_.count(entry.key()) > 0) continue;
    const absl::Status status = directory->Set(entry.key(), entry.value());
    if (!status.ok()) {
      spdlog::warn("rendezvous key of job {}: {}", order.job_id(), std::string(status.message()));
      continue;
    }
    foreign_.insert(entry.key());
  }
}

}  // namespace mbridge::agent
