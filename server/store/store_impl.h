// Private to server/store: what Store holds, shared by open.cc, write.cc and read.cc.
#pragma once

#include <rocksdb/db.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/store/directory.h"
#include "server/store/store.h"

namespace mbridge::server {

struct Store::Impl {
  Options options;
  std::unique_ptr<DirectoryLock> lock;  // Outlives the database.
  std::unique_ptr<AcknowledgedMark> acknowledged;
  std::unique_ptr<rocksdb::DB> db;

  std::mutex write_mutex;     // Orders Commit, so that `acknowledged` grows.
  bool write_failed = false;  // RocksDB stays read-only after a failed write until Resume().

  mutable std::mutex quarantine_mutex;
  mutable std::vector<std::string> quarantined;

  // Notes a row that did not parse.
  void Quarantine(const rocksdb::Slice& key) const;
  // The value of a key; NotFound as such.
  rocksdb::Status Get(const std::string& key, std::string* value) const { return db->Get(rocksdb::ReadOptions(), key, value); }
  bool Has(const std::string& key) const;
};

// RocksDB's status as ours: STORE_FULL, STORE_DAMAGED or INTERNAL.
absl::Status FromRocks(const rocksdb::Status& status, const std::string& what);

}  // namespace mbridge::server
