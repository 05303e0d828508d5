// Checkpoints as the store knows them: commit, then retention, then deletion on the node. In this order.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>

#include "proto/rpc/status_details.h"
#include "server/nodes/controller_state.h"
#include "server/nodes/names.h"
#include "server/nodes/rank_specs.h"

namespace mbridge::server {
namespace {

constexpr std::chrono::seconds kDeletionRetry{60};

void SetEtag(v1::Checkpoint* checkpoint) { checkpoint->set_etag(std::to_string(std::atoll(checkpoint->etag().c_str()) + 1)); }

}  // namespace

void Controller::State::CommitCheckpoint(const v1::Job& job, int32_t attempt, const std::string& node_id,
                                         v1::Checkpoint checkpoint, Transition* transition,
                                         std::vector<v1::Checkpoint>* committed) const {
  if (!IsBeneath(checkpoint.path(), CheckpointDirectory(job))) {
    spdlog::warn("job {}: checkpoint outside of its directory ignored: {}", job.job_id(), checkpoint.path());
    return;
  }
  std::string id = fmt::format("{}@{}", job.run_name(), checkpoint.step());
  const auto known = [&](const std::string& name) -> std::optional<v1::Checkpoint> {
    for (const auto& pending : transition->checkpoints) {
      if (pending.checkpoint_id() == name) return pending;
    }
    auto stored = store->GetCheckpoint(name);
    return stored.ok() ? std::optional(*stored) : std::nullopt;
  };
  // Another attempt, or another job that resumed the run, wrote this step before: both stay.
  const std::string base = id;
  for (int number = std::max(attempt, 2); auto other = known(id); ++number) {
    if (other->job_id() == job.job_id() && other->attempt() == attempt && other->path() == checkpoint.path())
      return;  // Comes again.
    id = fmt::format("{}.{}", base, number);
  }
  checkpoint.set_checkpoint_id(id);
  checkpoint.set_run_name(job.run_name());
  checkpoint.set_job_id(job.job_id());
  checkpoint.set_attempt(attempt);
  checkpoint.set_node_id(node_id);
  checkpoint.set_state(v1::CHECKPOINT_STATE_COMMITTED);
  checkpoint.set_pinned(false);
  *checkpoint.mutable_commit_time() = WallNow();
  for (const v1::Attempt& each : job.attempts()) {
    if (each.attempt() == attempt) checkpoint.set_parent_checkpoint_id(each.from_checkpoint_id());
  }
  SetEtag(&checkpoint);
  committed->push_back(checkpoint);
  transition->checkpoints.push_back(std::move(checkpoint));
}

// Adds the marked row to the transition. Returns what to offer instead.
std::string Controller::State::MarkCorrupt(const std::string& checkpoint_id, const std::string& detail,
                                           Transition* transition) const {
  auto checkpoint = store->GetCheckpoint(checkpoint_id);
  if (!checkpoint.ok() || checkpoint->state() != v1::CHECKPOINT_STATE_COMMITTED) return {};
  checkpoint->set_state(v1::CHECKPOINT_STATE_CORRUPT);
  checkpoint->set_detail(detail);
  SetEtag(&*checkpoint);
  transition->checkpoints.push_back(*checkpoint);
  std::string others;
  for (const auto& other : store->ListCheckpoints(checkpoint->run_name()).value_or(std::vector<v1::Checkpoint>())) {
    if (other.state() != v1::CHECKPOINT_STATE_COMMITTED || other.checkpoint_id() == checkpoint_id) continue;
    others += (others.empty() ? "" : ", ") + other.checkpoint_id();
  }
  if (others.empty()) return fmt::format("checkpoint {} is corrupt; its run has no other", checkpoint_id);
  return fmt::format("checkpoint {} is corrupt; `--from` takes one of {}", checkpoint_id, others);
}

std::string Controller::RecordCorruption(const std::string& id, const std::string& detail) {
  Section section(*state_);
  Transition transition;
  std::string offer = state_->MarkCorrupt(id, detail, &transition);
  if (const absl::Status stored = state_->store->Commit(transition); !stored.ok()) {
    spdlog::warn("checkpoint {}: {}", id, std::string(stored.message()));
  }
  return offer;
}

std::string Controller::State::UserOf(const std::string& checkpoint_id) const {
  for (const auto& [job_id, job] : live) {
    if (job.job.spec().start().checkpoint_id() == checkpoint_id) return job_id;
    const v1::Attempt* attempt = CurrentAttempt(job.job);
    if (attempt != nullptr && attempt->from_checkpoint_id() == checkpoint_id) return job_id;
  }
  return {};
}

// checkpoint.most_recent_k: keeps the newest k that are not pinned. Never fewer than one; never one that a live job
// starts from.
void Controller::State::ApplyRetention(const v1::Job& job) {
  const int64_t keep = job.resolved().config().checkpoint().most_recent_k();
  if (keep <= 0) return;
  auto checkpoints = store->ListCheckpoints(job.run_name());
  if (!checkpoints.ok()) return;
  std::erase_if(*checkpoints, [](const v1::Checkpoint& c) { return c.state() != v1::CHECKPOINT_STATE_COMMITTED || c.pinned(); });
  if (static_cast<int64_t>(checkpoints->size()) <= keep) return;
  checkpoints->resize(checkpoints->size() - static_cast<size_t>(keep));
  std::erase_if(*checkpoints, [this](const v1::Checkpoint& c) { return !UserOf(c.checkpoint_id()).empty(); });
  if (const absl::Status started = StartDeletion(std::move(*checkpoints)); !started.ok()) {
    spdlog::warn("retention of run {}: {}", job.run_name(), std::string(started.message()));
  }
}

// The decision and the work that follows from it are stored together; the directory goes when the agent gets to it.
absl::Status Controller::State::StartDeletion(std::vector<v1::Checkpoint> checkpoints) {
  Transition transition;
  for (v1::Checkpoint& checkpoint : checkpoints) {
    checkpoint.set_state(v1::CHECKPOINT_STATE_DELETING);
    SetEtag(&checkpoint);
    v1::NodeTask task;
    task.set_task_id("delete:" + checkpoint.checkpoint_id());
    task.mutable_delete_()->set_path(checkpoint.path());
    transition.outbox_add.push_back({checkpoint.node_id(), std::move(task)});
    transition.checkpoints.push_back(std::move(checkpoint));
  }
  MB_RETURN_IF_ERROR(store->Commit(transition));
  for (const OutboxEntry& entry : transition.outbox_add) {
    NodeEntry& node = nodes[entry.node_id];
    node.node.set_node_id(entry.node_id);
    node.tasks[entry.task.task_id()] = PendingTask{entry.task, nullptr, std::nullopt, Now()};
    notices.push_back({.job_id = {}, .node_id = entry.node_id, .progress = {}});
  }
  return absl::OkStatus();
}

void Controller::State::FinishDeletion(NodeEntry& node, const v1::NodeTask& task, const v1::TaskResult& result) {
  const std::string checkpoint_id = task.task_id().substr(task.task_id().find(':') + 1);
  auto checkpoint = store->GetCheckpoint(checkpoint_id);
  Transition transition;
  if (checkpoint.ok()) {
    checkpoint->set_detail(result.detail());
    if (result.ok()) checkpoint->set_state(v1::CHECKPOINT_STATE_DELETED);
    SetEtag(&*checkpoint);
    transition.checkpoints.push_back(*checkpoint);
  }
  if (result.ok()) transition.outbox_remove.emplace_back(node.node.node_id(), task.task_id());
  const absl::Status stored = store->Commit(transition);
  if (stored.ok() && result.ok()) {
    node.tasks.erase(task.task_id());
    return;
  }
  node.tasks.at(task.task_id()).not_before = Now() + kDeletionRetry;
  spdlog::warn("deleting checkpoint {}: {}", checkpoint_id, result.ok() ? std::string(stored.message()) : result.detail());
}

absl::StatusOr<v1::Checkpoint> Controller::PinCheckpoint(const std::string& id, bool pinned, const std::string& etag) {
  Section section(*state_);
  MB_ASSIGN_OR_RETURN(v1::Checkpoint checkpoint, state_->store->GetCheckpoint(id));
  if (!etag.empty() && etag != checkpoint.etag()) {
    return MakeStatus(
        absl::StatusCode::kAborted, v1::REASON_ETAG_MISMATCH,
        fmt::format("checkpoint {} has etag {}, the request was for {}; read it again", id, checkpoint.etag(), etag));
  }
  if (checkpoint.state() != v1::CHECKPOINT_STATE_COMMITTED && checkpoint.state() != v1::CHECKPOINT_STATE_CORRUPT) {
    return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND, fmt::format("checkpoint {} was deleted", id));
  }
  if (checkpoint.pinned() == pinned) return checkpoint;
  checkpoint.set_pinned(pinned);
  SetEtag(&checkpoint);
  Transition transition;
  transition.checkpoints.push_back(checkpoint);
  MB_RETURN_IF_ERROR(state_->store->Commit(transition));
  return checkpoint;
}

absl::StatusOr<v1::Checkpoint> Controller::DeleteCheckpoint(const std::string& id, bool force) {
  Section section(*state_);
  MB_ASSIGN_OR_RETURN(const v1::Checkpoint checkpoint, state_->store->GetCheckpoint(id));
  const bool gone = checkpoint.state() == v1::CHECKPOINT_STATE_DELETING || checkpoint.state() == v1::CHECKPOINT_STATE_DELETED;
  if (gone) return checkpoint;
  const auto in_use = [](const std::string& text) {
    return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_CHECKPOINT_IN_USE, text);
  };
  if (checkpoint.pinned()) return in_use(fmt::format("checkpoint {} is pinned; `mbctl ckpt unpin {}` first", id, id));
  if (const std::string user = state_->UserOf(id); !user.empty()) {
    return in_use(fmt::format("job {} starts from checkpoint {}", user, id));
  }
  MB_ASSIGN_OR_RETURN(const auto of_run, state_->store->ListCheckpoints(checkpoint.run_name()));
  const auto committed = std::count_if(of_run.begin(), of_run.end(),
                                       [](const v1::Checkpoint& c) { return c.state() == v1::CHECKPOINT_STATE_COMMITTED; });
  if (committed <= 1 && checkpoint.state() == v1::CHECKPOINT_STATE_COMMITTED && !force) {
    return in_use(fmt::format("checkpoint {} is the last one of run {}; --force deletes it", id, checkpoint.run_name()));
  }
  MB_RETURN_IF_ERROR(state_->StartDeletion({checkpoint}));
  return state_->store->GetCheckpoint(id);
}

absl::StatusOr<v1::Checkpoint> Controller::RecordVerification(const std::string& id, const v1::TaskResult& result) {
  Section section(*state_);
  MB_ASSIGN_OR_RETURN(v1::Checkpoint checkpoint, state_->store->GetCheckpoint(id));
  const bool kept = checkpoint.state() == v1::CHECKPOINT_STATE_COMMITTED || checkpoint.state() == v1::CHECKPOINT_STATE_CORRUPT;
  if (kept && result.ok()) {
    checkpoint.set_state(v1::CHECKPOINT_STATE_COMMITTED);
    checkpoint.clear_detail();
    *checkpoint.mutable_verify_time() = state_->WallNow();
  } else if (kept && result.reason() == v1::REASON_CHECKPOINT_CORRUPT) {
    checkpoint.set_state(v1::CHECKPOINT_STATE_CORRUPT);
    checkpoint.set_detail(result.detail());
    *checkpoint.mutable_verify_time() = state_->WallNow();
  } else {
    return MakeStatus(absl::StatusCode::kUnavailable, result.reason(), result.detail());
  }
  SetEtag(&checkpoint);
  Transition transition;
  transition.checkpoints.push_back(checkpoint);
  MB_RETURN_IF_ERROR(state_->store->Commit(transition));
  return checkpoint;
}

}  // namespace mbridge::server
