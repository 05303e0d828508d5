// Reading. A row that does not parse is named in Quarantined() and left out.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "proto/rpc/status_details.h"
#include "server/store/keys.h"
#include "server/store/store_impl.h"

namespace mbridge::server {
namespace {

// Calls `visit(key, value)` for every row that starts with `prefix`, from `start` on, until it returns false.
template <class Visit> absl::Status ForEach(rocksdb::DB* db, const std::string& prefix, const std::string& start, Visit visit) {
  std::unique_ptr<rocksdb::Iterator> row(db->NewIterator(rocksdb::ReadOptions()));
  for (row->Seek(start); row->Valid() && row->key().starts_with(prefix); row->Next()) {
    if (!visit(row->key(), row->value())) break;
  }
  return FromRocks(row->status(), "reading the store");
}

template <class Message> bool Parse(const rocksdb::Slice& value, Message* message) {
  return message->ParseFromArray(value.data(), static_cast<int>(value.size()));
}

absl::Status NotFound(v1::Reason reason, const std::string& text) {
  return MakeStatus(absl::StatusCode::kNotFound, reason, text);
}

// The smallest key after `key`.
std::string After(std::string key) {
  key.push_back('\0');
  return key;
}

}  // namespace

absl::StatusOr<v1::Job> Store::GetJob(const std::string& job_id) const {
  std::string value;
  const auto found = impl_->Get(keys::Plain(keys::kJob, job_id), &value);
  if (found.IsNotFound()) {
    return NotFound(v1::REASON_JOB_NOT_FOUND, fmt::format("there is no job {}; `mbctl ps -a` lists the jobs", job_id));
  }
  MB_RETURN_IF_ERROR(FromRocks(found, job_id));
  v1::Job job;
  if (!job.ParseFromString(value)) {
    impl_->Quarantine(keys::Plain(keys::kJob, job_id));
    return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_STORE_DAMAGED, fmt::format("the row of job {} is damaged", job_id));
  }
  return job;
}

absl::StatusOr<v1::ResolvedConfig> Store::GetResolved(const std::string& job_id) const {
  std::string value;
  const auto found = impl_->Get(keys::Plain(keys::kResolved, job_id), &value);
  if (found.IsNotFound()) return NotFound(v1::REASON_JOB_NOT_FOUND, fmt::format("there is no job {}", job_id));
  MB_RETURN_IF_ERROR(FromRocks(found, job_id));
  v1::ResolvedConfig resolved;
  if (!resolved.ParseFromString(value)) {
    impl_->Quarantine(keys::Plain(keys::kResolved, job_id));
    return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_STORE_DAMAGED,
                      fmt::format("the configuration row of job {} is damaged", job_id));
  }
  return resolved;
}

absl::Status Store::VisitJobs(const std::string& before, const std::function<bool(const v1::Job&)>& visit) const {
  const std::string prefix(1, keys::kJob);
  std::unique_ptr<rocksdb::Iterator> row(impl_->db->NewIterator(rocksdb::ReadOptions()));
  // SeekForPrev may land on the bound itself, which is excluded.
  const std::string bound = before.empty() ? std::string(1, keys::kJob + 1) : prefix + before;
  for (row->SeekForPrev(bound); row->Valid() && row->key().starts_with(prefix); row->Prev()) {
    if (row->key() == rocksdb::Slice(bound)) continue;
    v1::Job job;
    if (!Parse(row->value(), &job)) {
      impl_->Quarantine(row->key());
    } else if (!visit(job)) {
      break;
    }
  }
  return FromRocks(row->status(), "reading the jobs");
}

absl::StatusOr<std::vector<v1::JobEvent>> Store::ListEvents(const std::string& job_id, int64_t after, int limit) const {
  std::vector<v1::JobEvent> events;
  const auto visit = [&](const rocksdb::Slice& key, const rocksdb::Slice& value) {
    v1::JobEvent event;
    if (Parse(value, &event)) {
      events.push_back(std::move(event));
    } else {
      impl_->Quarantine(key);
    }
    return static_cast<int>(events.size()) < limit;
  };
  MB_RETURN_IF_ERROR(ForEach(impl_->db.get(), keys::Prefix(keys::kEvent, job_id), keys::Event(job_id, after + 1), visit));
  return events;
}

absl::StatusOr<Store::MetricPage> Store::ListMetrics(const std::string& job_id, int32_t attempt, bool effective,
                                                     const std::string& cursor, int limit) const {
  if (!cursor.empty() && cursor.size() != keys::kMetricSuffix) {
    return InvalidFields(v1::REASON_INVALID_REQUEST, {{"resume_token", "is not one that this server gave out"}});
  }
  const std::string job_prefix = keys::Prefix(keys::kMetric, job_id);
  std::string prefix = job_prefix;
  if (attempt > 0) keys::AppendBigEndian(&prefix, static_cast<uint32_t>(attempt), 4);
  const int32_t newest_attempt = [&] {
    std::unique_ptr<rocksdb::Iterator> row(impl_->db->NewIterator(rocksdb::ReadOptions()));
    row->SeekForPrev(job_prefix + std::string(keys::kMetricSuffix, '\xff'));
    if (!effective || attempt > 0 || !row->Valid() || !row->key().starts_with(job_prefix)) return int32_t{0};
    return static_cast<int32_t>(keys::ReadBigEndian({row->key().data() + job_prefix.size(), 4}));
  }();
  const auto superseded = [&](v1::MetricPoint point) {
    for (int32_t later = point.attempt() + 1; later <= newest_attempt; ++later) {
      point.set_attempt(later);
      if (impl_->Has(job_prefix + keys::MetricSuffix(point))) return true;
    }
    return false;
  };

  MetricPage page;
  page.cursor = cursor;
  page.end = true;
  const auto visit = [&](const rocksdb::Slice& key, const rocksdb::Slice& value) {
    if (static_cast<int>(page.points.size()) == limit) {
      page.end = false;
      return false;
    }
    page.cursor.assign(key.data() + job_prefix.size(), key.size() - job_prefix.size());
    v1::MetricPoint point;
    if (!Parse(value, &point)) {
      impl_->Quarantine(key);
    } else if (!superseded(point)) {
      page.points.push_back(std::move(point));
    }
    return true;
  };
  const std::string start = cursor.empty() ? prefix : std::max(prefix, After(job_prefix + cursor));
  MB_RETURN_IF_ERROR(ForEach(impl_->db.get(), prefix, start, visit));
  return page;
}

absl::StatusOr<v1::Checkpoint> Store::GetCheckpoint(const std::string& checkpoint_id) const {
  std::string value;
  const auto found = impl_->Get(keys::Plain(keys::kCheckpoint, checkpoint_id), &value);
  v1::Checkpoint checkpoint;
  if (found.ok() && checkpoint.ParseFromString(value)) return checkpoint;
  if (!found.ok() && !found.IsNotFound()) return FromRocks(found, checkpoint_id);
  return NotFound(v1::REASON_CHECKPOINT_NOT_FOUND,
                  fmt::format("there is no checkpoint {}; `mbctl ckpt ls` lists the committed ones", checkpoint_id));
}

absl::StatusOr<std::vector<v1::Checkpoint>> Store::ListCheckpoints(const std::string& run_name) const {
  const std::string prefix = run_name.empty() ? std::string(1, keys::kRunIndex) : keys::Prefix(keys::kRunIndex, run_name);
  std::vector<v1::Checkpoint> checkpoints;
  const auto visit = [&](const rocksdb::Slice& key, const rocksdb::Slice&) {
    constexpr size_t kTimeBytes = 8;
    const std::string text = key.ToString();
    const std::string id = text.substr(text.find('\0') + 1 + kTimeBytes);
    auto checkpoint = GetCheckpoint(id);
    if (checkpoint.ok()) checkpoints.push_back(std::move(checkpoint).value());
    return true;
  };
  MB_RETURN_IF_ERROR(ForEach(impl_->db.get(), prefix, prefix, visit));
  return checkpoints;
}

absl::StatusOr<std::optional<IdempotencyRecord>> Store::FindRequest(const std::string& request_id) const {
  std::string value;
  const auto found = impl_->Get(keys::Plain(keys::kRequest, request_id), &value);
  if (found.IsNotFound()) return std::optional<IdempotencyRecord>();
  MB_RETURN_IF_ERROR(FromRocks(found, "reading request ids"));
  const size_t first = value.find('\n');
  const size_t second = value.find('\n', first + 1);
  if (second == std::string::npos) return std::optional<IdempotencyRecord>();
  return IdempotencyRecord{.request_id = request_id,
                           .job_id = value.substr(0, first),
                           .body_hash = value.substr(first + 1, second - first - 1),
                           .unix_seconds = std::atoll(value.c_str() + second + 1)};
}

absl::StatusOr<std::vector<v1::Node>> Store::ListNodes() const {
  std::vector<v1::Node> nodes;
  const std::string prefix(1, keys::kNode);
  MB_RETURN_IF_ERROR(ForEach(impl_->db.get(), prefix, prefix, [&](const rocksdb::Slice&, const rocksdb::Slice& value) {
    v1::Node node;
    if (Parse(value, &node)) nodes.push_back(std::move(node));
    return true;
  }));
  return nodes;
}

absl::StatusOr<std::vector<OutboxEntry>> Store::ListOutbox() const {
  std::vector<OutboxEntry> entries;
  const std::string prefix(1, keys::kOutbox);
  MB_RETURN_IF_ERROR(ForEach(impl_->db.get(), prefix, prefix, [&](const rocksdb::Slice& key, const rocksdb::Slice& value) {
    OutboxEntry entry;
    const std::string text = key.ToString();
    entry.node_id = text.substr(1, text.find('\0') - 1);
    if (Parse(value, &entry.task)) entries.push_back(std::move(entry));
    return true;
  }));
  return entries;
}

absl::StatusOr<uint64_t> Store::AcknowledgedSequence(const std::string& job_id, int32_t attempt) const {
  std::string value;
  const auto found = impl_->Get(keys::Acknowledged(job_id, attempt), &value);
  if (found.IsNotFound()) return uint64_t{0};
  MB_RETURN_IF_ERROR(FromRocks(found, job_id));
  return std::strtoull(value.c_str(), nullptr, 10);
}

}  // namespace mbridge::server
