// Opening: lock, damage and version checks, moving bad rows aside, dropping expired request ids.
#include <fmt/format.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>

#include "proto/rpc/status_details.h"
#include "server/store/keys.h"
#include "server/store/store_impl.h"

namespace mbridge::server {
namespace {

constexpr int64_t kRequestLifetimeSeconds = 7 * 24 * 3600;
// Up to this size every block is read and checked at open; beyond it blocks are checked when they are read.
constexpr uint64_t kFullCheckBytes = 256 << 20;
constexpr char kVersionKey[] = "Vversion";

absl::Status Damaged(const std::string& directory, const std::string& why) {
  return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_STORE_DAMAGED,
                    fmt::format("{}: {}. It was not opened, to lose nothing silently: restore a backup of the directory, "
                                "or start with an empty --state-dir",
                                directory, why));
}

// RocksDB's own recovery polls every 5 s and refuses Resume() meanwhile; Commit resumes at the next write instead.
class NoAutomaticRecovery : public rocksdb::EventListener {
 public:
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status, bool* automatic) override { *automatic = false; }
};

rocksdb::Options RocksOptions(const Store::Options& options, bool fresh) {
  rocksdb::Options rocks;
  if (options.testing_env != nullptr) rocks.env = options.testing_env;
  rocks.create_if_missing = fresh;
  rocks.paranoid_checks = true;
  // Accepts only an incomplete last record; whether one is missing that had been acknowledged is checked afterwards.
  rocks.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  rocks.track_and_verify_wals_in_manifest = true;
  rocks.listeners.push_back(std::make_shared<NoAutomaticRecovery>());
  rocks.write_buffer_size = 16 << 20;
  rocks.max_open_files = 256;
  rocks.max_background_jobs = 2;
  rocks.keep_log_file_num = 4;
  rocks.max_log_file_size = 4 << 20;
  return rocks;
}

// True where the row is one that this version can use. Unknown tables are left alone.
bool RowParses(const rocksdb::Slice& key, const rocksdb::Slice& value) {
  const std::string id(key.data() + 1, key.size() - 1);
  const int size = static_cast<int>(value.size());
  switch (key[0]) {
    case keys::kJob: {
      v1::Job job;
      return job.ParseFromArray(value.data(), size) && job.job_id() == id;
    }
    case keys::kCheckpoint: {
      v1::Checkpoint checkpoint;
      return checkpoint.ParseFromArray(value.data(), size) && checkpoint.checkpoint_id() == id;
    }
    case keys::kNode: {
      v1::Node node;
      return node.ParseFromArray(value.data(), size) && node.node_id() == id;
    }
    case keys::kOutbox: {
      v1::NodeTask task;
      return task.ParseFromArray(value.data(), size) && !task.task_id().empty();
    }
    default: return true;
  }
}

bool IsExpiredRequest(const rocksdb::Slice& key, const rocksdb::Slice& value, int64_t now) {
  if (key[0] != keys::kRequest) return false;
  const std::string text = value.ToString();
  const size_t last_line = text.rfind('\n');
  return last_line == std::string::npos || std::atoll(text.c_str() + last_line + 1) + kRequestLifetimeSeconds < now;
}

absl::Status CheckVersion(rocksdb::DB* db, const std::string& directory, bool fresh) {
  std::string text;
  const rocksdb::Status found = db->Get(rocksdb::ReadOptions(), kVersionKey, &text);
  if (found.IsNotFound()) {
    // A store that was created but died before its first write is empty, and so as good as fresh.
    if (!fresh && db->GetLatestSequenceNumber() > 0) return Damaged(directory, "the store has no version row");
    rocksdb::WriteOptions sync;
    sync.sync = true;
    return FromRocks(db->Put(sync, kVersionKey, std::to_string(kStoreVersion)), directory);
  }
  if (!found.ok()) return FromRocks(found, directory);
  const int version = std::atoi(text.c_str());
  if (version <= kStoreVersion) return absl::OkStatus();
  return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_STORE_TOO_NEW,
                    fmt::format("{} has store version {}, this program knows up to {}; use the newer version, a backup or "
                                "another --state-dir",
                                directory, version, kStoreVersion));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(Options options) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(options.directory, error);
  if (error) return absl::FailedPreconditionError(fmt::format("{}: {}", options.directory, error.message()));
  fs::permissions(options.directory, fs::perms::owner_all, error);  // Configurations may hold secrets.
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  const std::string& directory = impl->options.directory;
  MB_ASSIGN_OR_RETURN(impl->lock, DirectoryLock::Acquire(directory));
  MB_ASSIGN_OR_RETURN(impl->acknowledged, AcknowledgedMark::Open(directory));

  const bool fresh = !fs::exists(directory + "/db/CURRENT");
  const uint64_t expected = impl->acknowledged->value();
  if (fresh && expected > 0) return Damaged(directory, "db/CURRENT is missing, so the rows are not reachable");
  rocksdb::DB* db = nullptr;
  const rocksdb::Status opened = rocksdb::DB::Open(RocksOptions(impl->options, fresh), directory + "/db", &db);
  if (!opened.ok()) {
    if (opened.IsNoSpace()) return FromRocks(opened, directory);
    return Damaged(directory, opened.ToString());
  }
  impl->db.reset(db);
  if (const uint64_t found = db->GetLatestSequenceNumber(); found < expected) {
    return Damaged(directory, fmt::format("the log ends at write {}, but write {} had been acknowledged", found, expected));
  }
  uint64_t bytes = 0;
  db->GetIntProperty(rocksdb::DB::Properties::kTotalSstFilesSize, &bytes);
  if (bytes <= kFullCheckBytes) {
    if (const rocksdb::Status check = db->VerifyChecksum(); !check.ok()) return Damaged(directory, check.ToString());
  }
  MB_RETURN_IF_ERROR(CheckVersion(db, directory, fresh));

  rocksdb::WriteBatch repairs;
  const int64_t now = std::time(nullptr);
  for (const char table : {keys::kJob, keys::kCheckpoint, keys::kNode, keys::kOutbox, keys::kRequest}) {
    std::unique_ptr<rocksdb::Iterator> row(db->NewIterator(rocksdb::ReadOptions()));
    for (row->Seek(std::string(1, table)); row->Valid() && row->key()[0] == table; row->Next()) {
      if (IsExpiredRequest(row->key(), row->value(), now)) repairs.Delete(row->key());
      if (RowParses(row->key(), row->value())) continue;
      impl->Quarantine(row->key());
      repairs.Put(std::string(1, keys::kQuarantine) + row->key().ToString(), row->value());
      repairs.Delete(row->key());
    }
    if (!row->status().ok()) return Damaged(directory, row->status().ToString());
  }
  if (repairs.Count() > 0) MB_RETURN_IF_ERROR(FromRocks(db->Write(rocksdb::WriteOptions(), &repairs), directory));
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

std::vector<std::string> Store::Quarantined() const {
  std::lock_guard lock(impl_->quarantine_mutex);
  return impl_->quarantined;
}

void Store::Impl::Quarantine(const rocksdb::Slice& key) const {
  constexpr size_t kMaxNames = 1000;
  std::lock_guard guard(quarantine_mutex);
  const std::string name = keys::Describe({key.data(), key.size()});
  if (quarantined.size() >= kMaxNames) return;
  for (const std::string& known : quarantined) {
    if (known == name) return;
  }
  quarantined.push_back(name);
}

bool Store::Impl::Has(const std::string& key) const {
  std::string value;
  return Get(key, &value).ok();
}

absl::Status FromRocks(const rocksdb::Status& status, const std::string& what) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = fmt::format("{}: {}", what, status.ToString());
  if (status.IsNoSpace()) {
    return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_STORE_FULL,
                      text + "; nothing was stored, free space and repeat");
  }
  if (status.IsCorruption()) return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_STORE_DAMAGED, text);
  return absl::InternalError(text);
}

}  // namespace mbridge::server
