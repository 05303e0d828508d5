// Loading, transitions of jobs, and the calls that the API makes on jobs.
#include "server/nodes/controller.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "proto/rpc/status_details.h"
#include "server/nodes/controller_state.h"

namespace mbridge::server {

bool IsTerminal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED || state == v1::JOB_STATE_CANCELLED;
}

const v1::Attempt* CurrentAttempt(const v1::Job& job) {
  if (job.attempts().empty()) return nullptr;
  const v1::Attempt& last = job.attempts(job.attempts_size() - 1);
  return last.has_end_time() ? nullptr : &last;
}

v1::Attempt* CurrentAttempt(v1::Job& job) { return const_cast<v1::Attempt*>(CurrentAttempt(std::as_const(job))); }

Section::Section(Controller::State& state) : state_(state), lock_(state.mutex) {}

Section::~Section() {
  const auto notices = std::exchange(state_.notices, {});
  const auto callbacks = std::exchange(state_.callbacks, {});
  lock_.unlock();
  for (const auto& callback : callbacks) callback();
  if (!state_.listener) return;
  for (const auto& notice : notices) state_.listener(notice);
}

// --- Start.

Controller::State::State(Options options, Store* store, ServiceMetrics* metrics)
    : options(std::move(options)), store(store), metrics(metrics), logs(this->options.log_directory) {
  last_tick = last_gauges = Now();
}

Monotonic Controller::State::MonotonicOf(const google::protobuf::Timestamp& time) const {
  const auto ago = std::max(options.clock.wall() - FromTimestamp(time), std::chrono::system_clock::duration::zero());
  return Now() - std::chrono::duration_cast<Monotonic::duration>(ago);
}

absl::Status Controller::State::Load() {
  MB_ASSIGN_OR_RETURN(const auto stored_nodes, store->ListNodes());
  for (const v1::Node& stored : stored_nodes) {
    NodeEntry& entry = nodes[stored.node_id()];
    entry.node = stored;
    entry.drained = stored.state() == v1::NODE_STATE_DRAINED;
    entry.node.set_state(v1::NODE_STATE_UNREACHABLE);
    entry.last_report = Now();  // Its lost-node time begins anew: nobody was here to hear it.
  }
  MB_ASSIGN_OR_RETURN(const auto outbox, store->ListOutbox());
  for (const OutboxEntry& entry : outbox) {
    nodes[entry.node_id].node.set_node_id(entry.node_id);
    nodes[entry.node_id].tasks[entry.task.task_id()] = PendingTask{entry.task, nullptr, std::nullopt, Now()};
  }
  absl::Status failed;
  MB_RETURN_IF_ERROR(store->VisitJobs("", [&](const v1::Job& job) {
    if (IsTerminal(job.state())) return true;
    LiveJob& entry = live[job.job_id()];
    entry.job = job;
    entry.queued_since = MonotonicOf(job.create_time());
    entry.not_before = Now();
    if (job.has_start_time()) entry.started = MonotonicOf(job.start_time());
    if (job.state() == v1::JOB_STATE_STOPPING) entry.kill_at = Now() + options.cancel_grace;
    const v1::Attempt* attempt = CurrentAttempt(std::as_const(entry.job));
    if (attempt == nullptr) return true;
    for (const auto& place : attempt->placement()) {
      // A running attempt that its agent does not know any more is lost; one that was only being started is sent again.
      entry.parts[place.node_id()].reported = job.state() == v1::JOB_STATE_RUNNING;
      NodeEntry& node = nodes[place.node_id()];
      if (node.node.node_id().empty()) {
        node.node.set_node_id(place.node_id());
        node.node.set_state(v1::NODE_STATE_UNREACHABLE);
        node.last_report = Now();
      }
    }
    const auto acknowledged = store->AcknowledgedSequence(job.job_id(), attempt->attempt());
    if (!acknowledged.ok()) failed = acknowledged.status();
    entry.acknowledged = acknowledged.value_or(0);
    for (const auto& end : attempt->rank_ends()) {
      if (end.reason() != v1::REASON_COMPLETED) entry.bad_end = Now();
    }
    return failed.ok();
  }));
  return failed;
}

absl::StatusOr<std::unique_ptr<Controller>> Controller::Create(Options options, Store* store, ServiceMetrics* metrics) {
  auto state = std::make_unique<State>(std::move(options), store, metrics);
  MB_RETURN_IF_ERROR(state->Load());
  return std::unique_ptr<Controller>(new Controller(std::move(state)));
}

Controller::Controller(std::unique_ptr<State> state) : state_(std::move(state)) {}
Controller::~Controller() = default;
void Controller::SetListener(Listener listener) { state_->listener = std::move(listener); }
const LogArchive& Controller::logs() const { return state_->logs; }

// --- Transitions.

void Controller::State::NotifyJob(const std::string& job_id, std::optional<v1::MetricPoint> progress) {
  notices.push_back({.job_id = job_id, .node_id = {}, .progress = std::move(progress)});
}

void Controller::State::NotifyNodesOf(const LiveJob& job) {
  for (const auto& [node_id, part] : job.parts) notices.push_back({.job_id = {}, .node_id = node_id, .progress = {}});
}

Change Controller::State::Begin(LiveJob& job) const {
  Change change;
  change.live = &job;
  change.job = job.job;
  return change;
}

void Controller::State::AddEvent(Change* change, v1::EventKind kind, const std::string& detail,
                                 const std::string& checkpoint_id) const {
  v1::Job& job = change->job;
  job.set_event_sequence(job.event_sequence() + 1);
  v1::JobEvent event;
  event.set_job_id(job.job_id());
  event.set_sequence(job.event_sequence());
  *event.mutable_time() = WallNow();
  event.set_kind(kind);
  event.set_state(job.state());
  event.set_reason(job.reason());
  event.set_detail(detail);
  event.set_attempt(job.attempts_size());
  event.set_checkpoint_id(checkpoint_id);
  change->transition.events.push_back(std::move(event));
}

void Controller::State::SetState(Change* change, v1::JobState state, v1::Reason reason, const std::string& detail) const {
  v1::Job& job = change->job;
  job.set_state(state);
  job.set_reason(reason);
  job.set_detail(detail);
  if (IsTerminal(state)) {
    *job.mutable_end_time() = WallNow();
    job.set_queue_position(0);
  }
  AddEvent(change, v1::EVENT_KIND_STATE, detail);
}

void Controller::State::EndAttempt(Change* change, Cause cause) const {
  v1::Job& job = change->job;
  v1::Attempt* attempt = CurrentAttempt(job);
  *attempt->mutable_end_time() = WallNow();
  attempt->set_reason(cause.reason);
  if (cause.reason == v1::REASON_CHECKPOINT_CORRUPT && !attempt->from_checkpoint_id().empty()) {
    const std::string offer = MarkCorrupt(attempt->from_checkpoint_id(), cause.detail, &change->transition);
    if (!offer.empty()) cause.detail += (cause.detail.empty() ? "" : "; ") + offer;
  }
  attempt->set_detail(cause.detail);
  if (job.progress().attempt() == attempt->attempt()) {
    attempt->set_last_step(std::max(attempt->last_step(), job.progress().step()));
  }
  change->ended = Judge(job, cause);
  if (change->ended->state == v1::JOB_STATE_QUEUED) {
    job.set_restarts(job.restarts() + 1);
    metrics->AttemptRestarted(cause.reason);
  }
  if (cause.reason == v1::REASON_CHECKPOINT_CORRUPT || cause.reason == v1::REASON_CHECKPOINT_IO_ERROR ||
      cause.reason == v1::REASON_DISK_FULL) {
    metrics->CheckpointFailed(cause.reason);
  }
  SetState(change, change->ended->state, change->ended->reason, change->ended->detail);
}

absl::Status Controller::State::Apply(Change change) {
  v1::Job& job = change.job;
  job.set_etag(std::to_string(job.event_sequence()));
  change.transition.job = job;
  if (absl::Status stored = store->Commit(change.transition); !stored.ok()) {
    spdlog::error("job {}: {}", job.job_id(), std::string(stored.message()));
    return stored;
  }
  LiveJob& live_job = *change.live;
  const v1::JobState before = live_job.job.state();
  live_job.job = std::move(change.job);
  if (before != live_job.job.state()) {
    spdlog::info("job {} ({}): {} {}", live_job.job.job_id(), live_job.job.run_name(), v1::JobState_Name(live_job.job.state()),
                 live_job.job.detail());
  }
  for (const auto& checkpoint : change.committed) metrics->CheckpointCommitted(checkpoint);
  NotifyNodesOf(live_job);
  NotifyJob(live_job.job.job_id(), std::move(change.progress));
  if (change.ended) {
    live_job.not_before = Now() + change.ended->back_off;
    live_job.parts.clear();
    live_job.killed_by_us.clear();
    live_job.rendezvous.clear();
    live_job.bad_end.reset();
    live_job.acknowledged = 0;
    schedule_dirty = true;
  }
  const std::string job_id = live_job.job.job_id();
  if (!change.committed.empty()) ApplyRetention(live_job.job);
  if (IsTerminal(live_job.job.state())) {
    metrics->RemoveJob(job_id);
    metrics->JobFinished(live_job.job.spec().kind(), live_job.job.state(), live_job.job.reason());
    schedule_dirty = true;
    live.erase(job_id);
  }
  return absl::OkStatus();
}

// --- Calls of the API.

absl::StatusOr<Controller::StartPoint> Controller::CheckStart(const v1::StartSpec& start, const std::string& run_name) const {
  std::lock_guard lock(state_->mutex);
  return state_->CheckStart(start, run_name);
}

absl::StatusOr<v1::Job> Controller::AddJob(v1::Job job, std::optional<IdempotencyRecord> idempotency) {
  Section section(*state_);
  if (state_->refuse_jobs) {
    return MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_SERVICE_STOPPING, "the coordinator is stopping");
  }
  MB_ASSIGN_OR_RETURN(const StartPoint source, state_->CheckStart(job.spec().start(), job.run_name()));
  job.mutable_spec()->mutable_start()->set_checkpoint_id(source.checkpoint_id);
  *job.mutable_create_time() = state_->WallNow();
  LiveJob entry;
  entry.queued_since = entry.not_before = state_->Now();
  Change change = state_->Begin(entry);
  change.job = std::move(job);
  state_->SetState(&change, v1::JOB_STATE_QUEUED, v1::REASON_WAITING_FOR_SLOTS, "");
  change.job.set_etag(std::to_string(change.job.event_sequence()));
  change.transition.job = change.job;
  change.transition.store_resolved = true;
  change.transition.idempotency = std::move(idempotency);
  MB_RETURN_IF_ERROR(state_->store->Commit(change.transition));
  entry.job = change.job;
  entry.job.mutable_resolved()->clear_values();
  state_->metrics->JobSubmitted(change.job.spec().kind());
  const std::string job_id = change.job.job_id();
  state_->live[job_id] = std::move(entry);
  state_->schedule_dirty = true;
  state_->NotifyJob(job_id);
  return std::move(change.job);
}

absl::StatusOr<v1::Job> Controller::GetJob(const std::string& job_id) const {
  {
    std::lock_guard lock(state_->mutex);
    const auto found = state_->live.find(job_id);
    if (found != state_->live.end()) return found->second.job;
  }
  return state_->store->GetJob(job_id);
}

void Controller::Overlay(v1::Job* stored) const {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->live.find(stored->job_id());
  if (found != state_->live.end()) *stored = found->second.job;
}

std::vector<std::string> Controller::LiveJobs() const {
  std::lock_guard lock(state_->mutex);
  std::vector<std::string> ids;
  for (const auto& [job_id, job] : state_->live) ids.push_back(job_id);
  return ids;
}

void Controller::RefuseNewJobs() {
  std::lock_guard lock(state_->mutex);
  state_->refuse_jobs = true;
}

absl::StatusOr<v1::Job> Controller::StopJob(const std::string& job_id, bool kill, v1::Reason why) {
  Section section(*state_);
  const auto found = state_->live.find(job_id);
  if (found == state_->live.end()) {
    MB_ASSIGN_OR_RETURN(v1::Job finished, state_->store->GetJob(job_id));
    // Asked again for what has happened: idempotent. Anything else cannot be had any more.
    if (finished.state() == v1::JOB_STATE_CANCELLED) return finished;
    return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_JOB_FINISHED,
                      fmt::format("job {} has ended already: {}", job_id, v1::JobState_Name(finished.state())));
  }
  MB_RETURN_IF_ERROR(state_->Stop(found->second, kill, why, ""));
  const auto still = state_->live.find(job_id);
  if (still != state_->live.end()) return still->second.job;
  return state_->store->GetJob(job_id);
}

absl::Status Controller::State::Stop(LiveJob& job, bool kill, v1::Reason why, const std::string& detail) {
  const bool stopping = job.job.state() == v1::JOB_STATE_STOPPING;
  if (stopping && (!kill || job.job.kill_requested())) return absl::OkStatus();
  Change change = Begin(job);
  change.job.set_cancel_requested(true);
  change.job.set_kill_requested(kill);
  if (CurrentAttempt(std::as_const(change.job)) == nullptr) {
    SetState(&change, v1::JOB_STATE_CANCELLED, why, detail);
    return Apply(std::move(change));
  }
  SetState(&change, v1::JOB_STATE_STOPPING, why, detail);
  if (!kill) job.kill_at = Now() + options.cancel_grace;
  return Apply(std::move(change));
}

absl::StatusOr<Controller::StartPoint> Controller::State::CheckStart(const v1::StartSpec& start,
                                                                     const std::string& run_name) const {
  for (const auto& [job_id, job] : live) {
    if (job.job.run_name() != run_name) continue;
    return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_RUN_IN_USE,
                      fmt::format("job {} is writing to run {}; wait for it, `mbctl cancel {}`, or choose another --name", job_id,
                                  run_name, job_id));
  }
  MB_ASSIGN_OR_RETURN(auto checkpoints, store->ListCheckpoints(run_name));
  StartPoint newest;
  for (const auto& checkpoint : checkpoints) {
    if (checkpoint.state() == v1::CHECKPOINT_STATE_CORRUPT) newest.corrupt = checkpoint;
    if (checkpoint.state() != v1::CHECKPOINT_STATE_COMMITTED) continue;
    newest.checkpoint_id = checkpoint.checkpoint_id();
    newest.corrupt.reset();
  }
  std::erase_if(checkpoints, [](const v1::Checkpoint& c) { return c.state() != v1::CHECKPOINT_STATE_COMMITTED; });
  std::string names;
  for (const auto& checkpoint : checkpoints) names += (names.empty() ? "" : ", ") + checkpoint.checkpoint_id();

  if (start.mode() != v1::START_MODE_RESUME && !checkpoints.empty()) {
    const auto& last = checkpoints.back();
    return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_RUN_HAS_CHECKPOINTS,
                      fmt::format("run {} has checkpoints already: {}. To go on from the last one: `mbctl resume {} --from {}`. "
                                  "To start another run from it: `mbctl submit --start fork --from {} --name NEW ...`. Or choose "
                                  "another --name",
                                  run_name, names, last.job_id(), last.checkpoint_id(), last.checkpoint_id()));
  }
  if (start.mode() != v1::START_MODE_RESUME && start.mode() != v1::START_MODE_FORK) return StartPoint();
  if (start.checkpoint_id().empty()) {
    if (start.mode() == v1::START_MODE_FORK) {
      return InvalidFields(
          v1::REASON_INVALID_REQUEST,
          {{"start.checkpoint_id", "a fork needs the checkpoint to start from: --from CHECKPOINT; `mbctl ckpt ls` lists them"}});
    }
    if (!newest.checkpoint_id.empty()) return newest;
    return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND,
                      fmt::format("run {} has no committed checkpoint to resume from; `mbctl ckpt ls` lists all", run_name));
  }
  MB_ASSIGN_OR_RETURN(const v1::Checkpoint wanted, store->GetCheckpoint(start.checkpoint_id()));
  if (start.mode() == v1::START_MODE_RESUME && wanted.run_name() != run_name) {
    return InvalidFields(
        v1::REASON_INVALID_REQUEST,
        {{"start.checkpoint_id", fmt::format("{} is of run {}, not of {}; use --start fork to start another run from it",
                                             wanted.checkpoint_id(), wanted.run_name(), run_name)}});
  }
  if (wanted.state() == v1::CHECKPOINT_STATE_COMMITTED) return StartPoint{wanted.checkpoint_id(), {}};
  if (wanted.state() == v1::CHECKPOINT_STATE_CORRUPT) {
    return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT,
                      fmt::format("checkpoint {} is corrupt ({}); {}", wanted.checkpoint_id(), wanted.detail(),
                                  names.empty() ? "the run has no other" : "choose one of " + names));
  }
  return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND,
                    fmt::format("checkpoint {} was deleted; `mbctl ckpt ls` lists the committed ones", wanted.checkpoint_id()));
}

}  // namespace mbridge::server
