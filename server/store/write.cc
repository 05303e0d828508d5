// Commit: one synced WriteBatch.
#include <fmt/format.h>

#include "server/store/keys.h"
#include "server/store/store_impl.h"

namespace mbridge::server {
namespace {

void PutJob(const v1::Job& job, bool store_resolved, rocksdb::WriteBatch* batch) {
  if (store_resolved) batch->Put(keys::Plain(keys::kResolved, job.job_id()), job.resolved().SerializeAsString());
  if (job.resolved().values_size() == 0) {
    batch->Put(keys::Plain(keys::kJob, job.job_id()), job.SerializeAsString());
    return;
  }
  v1::Job small = job;  // Lists must not read hundreds of values a job.
  small.mutable_resolved()->clear_values();
  batch->Put(keys::Plain(keys::kJob, job.job_id()), small.SerializeAsString());
}

void Fill(const Transition& transition, rocksdb::WriteBatch* batch) {
  if (transition.job) PutJob(*transition.job, transition.store_resolved, batch);
  for (const auto& event : transition.events) {
    batch->Put(keys::Event(event.job_id(), event.sequence()), event.SerializeAsString());
  }
  for (const auto& [job_id, point] : transition.metrics) {
    batch->Put(keys::Prefix(keys::kMetric, job_id) + keys::MetricSuffix(point), point.SerializeAsString());
  }
  for (const auto& checkpoint : transition.checkpoints) {
    batch->Put(keys::Plain(keys::kCheckpoint, checkpoint.checkpoint_id()), checkpoint.SerializeAsString());
    batch->Put(keys::RunIndex(checkpoint), "");
  }
  if (const auto& record = transition.idempotency) {
    batch->Put(keys::Plain(keys::kRequest, record->request_id),
               fmt::format("{}\n{}\n{}", record->job_id, record->body_hash, record->unix_seconds));
  }
  for (const auto& node : transition.nodes) {
    batch->Put(keys::Plain(keys::kNode, node.node_id()), node.SerializeAsString());
  }
  for (const auto& entry : transition.outbox_add) {
    batch->Put(keys::Outbox(entry.node_id, entry.task.task_id()), entry.task.SerializeAsString());
  }
  for (const auto& [node_id, task_id] : transition.outbox_remove) batch->Delete(keys::Outbox(node_id, task_id));
  for (const auto& done : transition.acknowledged) {
    batch->Put(keys::Acknowledged(done.job_id, done.attempt), std::to_string(done.sequence));
  }
}

}  // namespace

bool Transition::empty() const {
  return !job && events.empty() && metrics.empty() && checkpoints.empty() && !idempotency && nodes.empty() &&
         outbox_add.empty() && outbox_remove.empty() && acknowledged.empty();
}

absl::Status Store::Commit(const Transition& transition) {
  if (transition.empty()) return absl::OkStatus();
  rocksdb::WriteBatch batch;
  Fill(transition, &batch);
  rocksdb::WriteOptions sync;
  sync.sync = true;

  std::lock_guard lock(impl_->write_mutex);
  const auto start = std::chrono::steady_clock::now();
  rocksdb::Status written;
  if (impl_->write_failed) written = impl_->db->Resume();
  if (written.ok()) written = impl_->db->Write(sync, &batch);
  impl_->write_failed = !written.ok();
  if (written.ok()) impl_->acknowledged->Set(impl_->db->GetLatestSequenceNumber());
  if (impl_->options.on_write) {
    impl_->options.on_write(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return FromRocks(written, impl_->options.directory);
}

}  // namespace mbridge::server
