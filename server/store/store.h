// Every fact that the coordinator must not lose, in an embedded RocksDB.
//
// One Commit() is one WriteBatch written with sync: the state of a job, its event, the idempotency record and the work
// that the transition causes on a node (outbox) are stored together or not at all. Nothing above this file sees RocksDB.
//
// Damage: the store refuses to open (STORE_DAMAGED) instead of opening with rows missing. A torn last WAL record, which
// kill -9 leaves, is no damage: such a write was never acknowledged. The sequence number of the last acknowledged write
// stands in `<directory>/acknowledged`; a store that recovers to less has lost something. A single row that does not
// parse is moved aside (Quarantined()) and the others are served.
//
// Thread-safe. Writers are serialised inside; readers see whole commits only.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mbridge/v1/agent_service.pb.h"
#include "mbridge/v1/checkpoint.pb.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/metric.pb.h"
#include "mbridge/v1/node.pb.h"

namespace rocksdb {
class Env;
}

namespace mbridge::server {

inline constexpr int kStoreVersion = 1;

// request_id -> the job that it made.
struct IdempotencyRecord {
  std::string request_id;
  std::string job_id;
  std::string body_hash;
  int64_t unix_seconds = 0;  // Records older than 7 days are dropped at open.
};

struct OutboxEntry {
  std::string node_id;
  v1::NodeTask task;
};

// What one transition changes; every part is optional.
struct Transition {
  std::optional<v1::Job> job;
  bool store_resolved = false;       // True at creation: also writes the whole resolved config of `job`.
  std::vector<v1::JobEvent> events;  // Stored kinds only; sequence set by the caller.
  std::vector<std::pair<std::string, v1::MetricPoint>> metrics;  // (job id, point); a repeated key overwrites.
  std::vector<v1::Checkpoint> checkpoints;
  std::optional<IdempotencyRecord> idempotency;
  std::vector<v1::Node> nodes;
  std::vector<OutboxEntry> outbox_add;
  std::vector<std::pair<std::string, std::string>> outbox_remove;  // (node id, task id)
  // Highest consecutive record sequence of an attempt that is stored.
  struct Acknowledged {
    std::string job_id;
    int32_t attempt = 0;
    uint64_t sequence = 0;
  };
  std::vector<Acknowledged> acknowledged;

  bool empty() const;
};

class Store {
 public:
  struct Options {
    std::string directory;
    std::function<void(double seconds)> on_write;  // Latency of each Commit.
    rocksdb::Env* testing_env = nullptr;           // Fault injection; must outlive the store.
  };

  // Creates the store where there is none. Errors: FAILED_PRECONDITION STORE_LOCKED (another process has it; names its
  // pid), FAILED_PRECONDITION STORE_TOO_NEW, DATA_LOSS STORE_DAMAGED, RESOURCE_EXHAUSTED STORE_FULL.
  static absl::StatusOr<std::unique_ptr<Store>> Open(Options options);
  ~Store();

  // Durable when OK is returned. RESOURCE_EXHAUSTED STORE_FULL: nothing was stored; works again once there is space.
  absl::Status Commit(const Transition& transition);

  // --- Jobs. Ids sort by creation. NOT_FOUND JOB_NOT_FOUND.
  absl::StatusOr<v1::Job> GetJob(const std::string& job_id) const;                  // resolved.values left out.
  absl::StatusOr<v1::ResolvedConfig> GetResolved(const std::string& job_id) const;  // Whole.
  // Newest first, starting below `before` (empty: the newest). `visit` returns false to stop.
  absl::Status VisitJobs(const std::string& before, const std::function<bool(const v1::Job&)>& visit) const;

  // --- Events of a job with sequence > after, in order, at most `limit`.
  absl::StatusOr<std::vector<v1::JobEvent>> ListEvents(const std::string& job_id, int64_t after, int limit) const;

  // --- Metrics. Order: attempt, step, final pass, kind. The cursor is opaque; empty = from the first.
  struct MetricPage {
    std::vector<v1::MetricPoint> points;
    std::string cursor;  // After the last point read.
    bool end = false;    // Nothing was left behind the cursor.
  };
  // attempt 0 = all. `effective` leaves out points that a later attempt has too.
  absl::StatusOr<MetricPage> ListMetrics(const std::string& job_id, int32_t attempt, bool effective, const std::string& cursor,
                                         int limit) const;

  // --- Checkpoints. NOT_FOUND CHECKPOINT_NOT_FOUND.
  absl::StatusOr<v1::Checkpoint> GetCheckpoint(const std::string& checkpoint_id) const;
  // All rows of a run in commit order, deleted ones too; run_name empty: all runs, by run name.
  absl::StatusOr<std::vector<v1::Checkpoint>> ListCheckpoints(const std::string& run_name) const;

  absl::StatusOr<std::optional<IdempotencyRecord>> FindRequest(const std::string& request_id) const;
  absl::StatusOr<std::vector<v1::Node>> ListNodes() const;
  absl::StatusOr<std::vector<OutboxEntry>> ListOutbox() const;
  absl::StatusOr<uint64_t> AcknowledgedSequence(const std::string& job_id, int32_t attempt) const;

  // Names of rows that did not parse at open or later.
  std::vector<std::string> Quarantined() const;

 private:
  struct Impl;
  explicit Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mbridge::server
