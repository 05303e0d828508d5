// Sync: what a node reports, and what it should do.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <csignal>

#include "proto/rpc/status_details.h"
#include "server/nodes/controller_state.h"
#include "server/nodes/rank_specs.h"

namespace mbridge::server {

absl::StatusOr<Controller::SyncAnswer> Controller::Sync(const v1::SyncRequest& request) {
  if (request.node_id().empty() || request.node_id().size() > 128) {
    return InvalidFields(v1::REASON_INVALID_REQUEST, {{"node_id", "must have 1 to 128 characters"}});
  }
  Section section(*state_);
  NodeEntry& node = state_->nodes[request.node_id()];
  node.last_report = state_->Now();
  const bool was_away = node.node.state() != v1::NODE_STATE_READY && node.node.state() != v1::NODE_STATE_DRAINED;
  const bool changed = node.node.inventory().SerializeAsString() != request.inventory().SerializeAsString();
  if (changed) *node.node.mutable_inventory() = request.inventory();
  node.node.set_node_id(request.node_id());
  node.node.set_state(node.drained ? v1::NODE_STATE_DRAINED : v1::NODE_STATE_READY);
  *node.node.mutable_last_report_time() = state_->WallNow();
  if (changed) {
    Transition transition;
    transition.nodes.push_back(node.node);
    MB_RETURN_IF_ERROR(state_->store->Commit(transition));
  }
  if (was_away || changed) {
    spdlog::info("node {} ({}, {} cores, {} GPUs) reports", request.node_id(), request.inventory().hostname(),
                 request.inventory().cpu_cores(), request.inventory().gpus_size());
    state_->schedule_dirty = true;
  }

  SyncAnswer answer;
  state_->TakeResults(node, request, &answer.response);
  bool delivered = request.results_size() > 0;
  std::set<std::string> mentioned;
  node.reported.clear();
  for (const auto& report : request.attempts()) {
    delivered = delivered || report.records_size() > 0 || report.logs_size() > 0;
    NodeEntry::Reported summary{.job_id = report.job_id(),
                                .attempt = report.attempt(),
                                .ended = report.phase() == v1::ATTEMPT_PHASE_ENDED,
                                .drained = report.drained(),
                                .ranks = {}};
    for (const auto& chunk : report.logs()) summary.ranks.insert(chunk.rank());
    node.reported.push_back(std::move(summary));
    state_->ArchiveLogs(report);
    const auto found = state_->live.find(report.job_id());
    const v1::Attempt* current = found == state_->live.end() ? nullptr : CurrentAttempt(std::as_const(found->second.job));
    if (current != nullptr && current->attempt() == report.attempt() && found->second.parts.contains(request.node_id())) {
      mentioned.insert(report.job_id());
      state_->ApplyReport(found->second, request.node_id(), report);
    } else {
      state_->KeepLateReport(request.node_id(), report);
      state_->schedule_dirty = true;  // It may have just let go of its slots.
    }
  }
  std::vector<std::string> unmentioned;
  for (const auto& [job_id, job] : state_->live) {
    if (job.parts.contains(request.node_id()) && !mentioned.contains(job_id)) unmentioned.push_back(job_id);
  }
  for (const std::string& job_id : unmentioned) state_->MissingFromReport(state_->live.at(job_id), request.node_id());
  if (state_->schedule_dirty) state_->SchedulePass();

  const auto acknowledged = std::move(*answer.response.mutable_acknowledged_results());
  answer.response = state_->OrdersFor(node);
  *answer.response.mutable_acknowledged_results() = acknowledged;
  answer.may_wait = !delivered && answer.response.version() == request.seen_version();
  for (const auto& order : answer.response.orders()) {
    const auto found = state_->live.find(order.job_id());
    if (found == state_->live.end()) continue;
    const auto part = found->second.parts.find(request.node_id());
    if (part != found->second.parts.end()) part->second.told = order.desired();
  }
  return answer;
}

v1::SyncResponse Controller::Orders(const std::string& node_id) const {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->nodes.find(node_id);
  return found == state_->nodes.end() ? v1::SyncResponse() : state_->OrdersFor(found->second);
}

void Controller::State::ArchiveLogs(const v1::AttemptReport& report) const {
  if (report.logs().empty() || (!live.contains(report.job_id()) && !store->GetJob(report.job_id()).ok())) return;
  for (const auto& chunk : report.logs()) {
    if (const absl::Status kept = logs.Append(report.job_id(), report.attempt(), chunk); !kept.ok()) {
      spdlog::warn("log of job {}: {}", report.job_id(), std::string(kept.message()));  // Unacknowledged: comes again.
      return;
    }
  }
}

// --- Reports of the current attempt of a live job.

void Controller::State::ApplyReport(LiveJob& job, const std::string& node_id, const v1::AttemptReport& report) {
  NodePart& part = job.parts[node_id];
  part.reported = true;
  if (!report.logs().empty()) NotifyJob(job.job.job_id());
  for (const auto& entry : report.rendezvous()) {
    auto& known = job.rendezvous[entry.key()];
    if (known.value == entry.value() && known.node_id == node_id) continue;
    known = {node_id, entry.value()};
    NotifyNodesOf(job);
  }
  Change change = Begin(job);
  ApplyRecords(&change, node_id, report);
  ApplyRankEnds(&change, report);
  const uint64_t acknowledged =
      change.transition.acknowledged.empty() ? job.acknowledged : change.transition.acknowledged.back().sequence;
  // Drained is true for this report only if its last record was among the stored ones.
  const bool drained = report.drained() && (report.records().empty() || report.records().rbegin()->sequence() <= acknowledged);
  bool all_drained = drained;
  for (const auto& [other_id, other] : job.parts) all_drained = all_drained && (other_id == node_id || other.drained);
  if (all_drained)
    EndAttempt(&change,
               CauseOf(*CurrentAttempt(std::as_const(change.job)), job.killed_by_us, job.job.state() == v1::JOB_STATE_STOPPING));

  const bool nothing =
      change.transition.empty() && !all_drained &&
      CurrentAttempt(std::as_const(change.job))->rank_ends_size() == CurrentAttempt(std::as_const(job.job))->rank_ends_size();
  if (nothing) {
    part.drained = drained;
    return;
  }
  const std::string job_id = job.job.job_id();
  if (!Apply(std::move(change)).ok()) return;  // Nothing is acknowledged: all of it comes again.
  const auto found = live.find(job_id);
  if (found == live.end() || all_drained) return;
  found->second.acknowledged = acknowledged;
  found->second.parts[node_id].drained = drained;
}

void Controller::State::ApplyRecords(Change* change, const std::string& node_id, const v1::AttemptReport& report) const {
  v1::Job& job = change->job;
  uint64_t next = change->live->acknowledged + 1;
  for (const v1::RankRecord& record : report.records()) {
    if (record.sequence() != next) continue;  // Seen before, or behind a gap that the agent fills.
    ++next;
    v1::Attempt* attempt = CurrentAttempt(job);
    if (record.has_started()) attempt->set_first_step(record.started().first_step());
    const bool converts = job.spec().kind() == v1::JOB_KIND_CONVERT;
    // Ranks speak before they train: of their memory.
    if (job.state() == v1::JOB_STATE_STARTING && (converts || record.what_case() != v1::RankRecord::kMessage)) {
      const char* doing = converts ? "converting" : "training";
      SetState(change, v1::JOB_STATE_RUNNING, v1::REASON_UNSPECIFIED,
               record.has_started() && record.started().first_step() > 0
                   ? fmt::format("training after step {}", record.started().first_step())
                   : doing);
    }
    switch (record.what_case()) {
      case v1::RankRecord::kMetric: {
        v1::MetricPoint point = record.metric();
        point.set_attempt(report.attempt());
        change->transition.metrics.emplace_back(job.job_id(), point);
        if (point.kind() != v1::METRIC_KIND_TRAIN) break;
        *job.mutable_progress() = point;
        change->progress = point;
        metrics->TrainPoint(job.job_id(), point);
        break;
      }
      case v1::RankRecord::kCheckpoint: {
        const size_t before = change->transition.checkpoints.size();
        CommitCheckpoint(job, report.attempt(), node_id, record.checkpoint(), &change->transition, &change->committed);
        if (change->transition.checkpoints.size() == before) break;
        const v1::Checkpoint& checkpoint = change->transition.checkpoints.back();
        AddEvent(change, v1::EVENT_KIND_CHECKPOINT, "committed", checkpoint.checkpoint_id());
        break;
      }
      case v1::RankRecord::kMessage: AddEvent(change, v1::EVENT_KIND_MESSAGE, record.message()); break;
      case v1::RankRecord::kFinished: attempt->set_last_step(record.finished().last_step()); break;
      default: break;
    }
  }
  if (next > change->live->acknowledged + 1) {
    change->transition.acknowledged.push_back({job.job_id(), report.attempt(), next - 1});
  }
}

void Controller::State::ApplyRankEnds(Change* change, const v1::AttemptReport& report) {
  LiveJob& live_job = *change->live;
  v1::Attempt* attempt = CurrentAttempt(change->job);
  const v1::DesiredState ordered = DesiredFor(live_job);
  for (const v1::RankEnd& reported : report.rank_ends()) {
    const bool known = std::any_of(attempt->rank_ends().begin(), attempt->rank_ends().end(),
                                   [&](const v1::RankEnd& end) { return end.rank() == reported.rank(); });
    if (known) continue;
    const v1::RankEnd end = Normalized(reported);
    *attempt->add_rank_ends() = end;
    if (end.reason() == v1::REASON_COMPLETED) continue;
    if (end.reason() == v1::REASON_CANCELLED_BY_USER && ordered == v1::DESIRED_STATE_STOP) continue;
    if (ordered == v1::DESIRED_STATE_KILL && end.signal() == SIGKILL) live_job.killed_by_us.insert(end.rank());
    const bool symptom = IsSymptom(end.reason());
    if (!live_job.bad_end) {
      live_job.bad_end = Now();
      live_job.only_symptoms = symptom;
    } else if (!symptom) {
      live_job.only_symptoms = false;
    }
  }
}

// An attempt that should be on the node, and that the node does not know.
void Controller::State::MissingFromReport(LiveJob& job, const std::string& node_id) {
  const bool never_started = !job.parts.at(node_id).reported;
  if (never_started && job.job.state() != v1::JOB_STATE_STOPPING) return;  // The order to run is (again) in the answer.
  Change change = Begin(job);
  EndAttempt(&change, {v1::REASON_NODE_LOST, fmt::format("node {} does not know the attempt{}", node_id,
                                                         never_started ? ": it had not started" : " any more")});
  Apply(std::move(change)).IgnoreError();  // Logged there; the next Sync comes here again.
}

// What an attempt that is over, or older than the current one, still has to tell: its metrics and durable checkpoints
// are kept, its job does not change.
void Controller::State::KeepLateReport(const std::string& node_id, const v1::AttemptReport& report) {
  if (report.records().empty()) return;
  const auto job = store->GetJob(report.job_id());
  if (!job.ok()) return;
  const auto acknowledged = store->AcknowledgedSequence(report.job_id(), report.attempt());
  if (!acknowledged.ok()) return;
  Transition transition;
  std::vector<v1::Checkpoint> committed;
  uint64_t next = *acknowledged + 1;
  for (const v1::RankRecord& record : report.records()) {
    if (record.sequence() != next) continue;
    ++next;
    if (record.has_metric()) {
      transition.metrics.emplace_back(report.job_id(), record.metric());
      transition.metrics.back().second.set_attempt(report.attempt());
    } else if (record.has_checkpoint()) {
      CommitCheckpoint(*job, report.attempt(), node_id, record.checkpoint(), &transition, &committed);
    }
  }
  transition.acknowledged.push_back({report.job_id(), report.attempt(), next - 1});
  if (const absl::Status stored = store->Commit(transition); !stored.ok()) {
    spdlog::error("late report of job {}: {}", report.job_id(), std::string(stored.message()));
  }
}

// --- Orders.

v1::DesiredState Controller::State::DesiredFor(const LiveJob& job) const {
  if (job.job.kill_requested() || (job.kill_at && Now() >= *job.kill_at)) return v1::DESIRED_STATE_KILL;
  if (job.bad_end && Now() >= *job.bad_end + (job.only_symptoms ? options.symptom_grace : options.cause_grace)) {
    return v1::DESIRED_STATE_KILL;
  }
  return job.job.state() == v1::JOB_STATE_STOPPING ? v1::DESIRED_STATE_STOP : v1::DESIRED_STATE_RUN;
}

v1::AttemptOrder Controller::State::OrderFor(const LiveJob& job, const std::string& node_id) const {
  const v1::Attempt& attempt = *CurrentAttempt(job.job);
  v1::AttemptOrder order;
  order.set_job_id(job.job.job_id());
  order.set_attempt(attempt.attempt());
  order.set_desired(DesiredFor(job));
  order.set_acknowledged_records(job.acknowledged);
  for (const auto& place : attempt.placement()) {
    if (place.node_id() != node_id) continue;
    v1::LogAck* log = order.add_logs();
    log->set_rank(place.rank());
    log->set_offset(logs.Size(order.job_id(), order.attempt(), place.rank()));
  }
  if (!job.parts.at(node_id).reported && order.desired() == v1::DESIRED_STATE_RUN) {
    for (auto& spec : SpecsFor(job, node_id)) *order.add_ranks() = std::move(spec);
  }
  for (const auto& [key, entry] : job.rendezvous) {
    if (entry.node_id == node_id) continue;
    v1::RendezvousEntry* out = order.add_rendezvous();
    out->set_key(key);
    out->set_value(entry.value);
  }
  return order;
}

v1::AttemptOrder Controller::State::OrderForStale(const NodeEntry::Reported& reported) const {
  v1::AttemptOrder order;
  order.set_job_id(reported.job_id);
  order.set_attempt(reported.attempt);
  const auto job = store->GetJob(reported.job_id);
  const bool unknown = !job.ok() && absl::IsNotFound(job.status());
  const bool over = reported.drained || (unknown && reported.ended);
  order.set_desired(over ? v1::DESIRED_STATE_FORGET : v1::DESIRED_STATE_KILL);
  if (!job.ok()) return order;
  order.set_acknowledged_records(store->AcknowledgedSequence(reported.job_id, reported.attempt).value_or(0));
  for (const v1::Attempt& attempt : job->attempts()) {
    if (attempt.attempt() != reported.attempt) continue;
    for (const auto& place : attempt.placement()) {
      v1::LogAck* log = order.add_logs();
      log->set_rank(place.rank());
      log->set_offset(logs.Size(reported.job_id, reported.attempt, place.rank()));
    }
  }
  return order;
}

v1::SyncResponse Controller::State::OrdersFor(const NodeEntry& node) const {
  v1::SyncResponse response;
  const std::string& node_id = node.node.node_id();
  for (const auto& [job_id, job] : live) {
    if (job.parts.contains(node_id) && CurrentAttempt(job.job) != nullptr) *response.add_orders() = OrderFor(job, node_id);
  }
  for (const auto& reported : node.reported) {
    const auto found = live.find(reported.job_id);
    const v1::Attempt* current = found == live.end() ? nullptr : CurrentAttempt(found->second.job);
    const bool is_current = current != nullptr && current->attempt() == reported.attempt && found->second.parts.contains(node_id);
    if (!is_current) *response.add_orders() = OrderForStale(reported);
  }
  for (const auto& [task_id, task] : node.tasks) {
    if (task.not_before <= Now()) *response.add_tasks() = task.task;
  }
  // The version names what should be done; progress of the acknowledgements is no news.
  v1::SyncResponse news = response;
  for (auto& order : *news.mutable_orders()) {
    order.clear_acknowledged_records();
    order.clear_logs();
    order.clear_ranks();
  }
  response.set_version(fmt::format("{}-{:016x}", options.instance_id, std::hash<std::string>()(news.SerializeAsString())));
  response.set_coordinator_instance(options.instance_id);
  response.set_build_id(options.build_id);
  return response;
}

// --- One-off tasks.

void Controller::State::TakeResults(NodeEntry& node, const v1::SyncRequest& request, v1::SyncResponse* response) {
  for (const v1::TaskResult& result : request.results()) {
    response->add_acknowledged_results(result.task_id());
    const auto found = node.tasks.find(result.task_id());
    if (found == node.tasks.end()) continue;
    if (found->second.callback) {
      callbacks.push_back([callback = std::move(found->second.callback), result] { callback(result); });
      node.tasks.erase(found);
    } else {
      FinishDeletion(node, v1::NodeTask(found->second.task), result);
    }
  }
}

void Controller::AbandonTasks() {
  Section section(*state_);
  for (auto& [node_id, node] : state_->nodes) {
    for (auto& [task_id, task] : node.tasks) {
      if (!task.callback) continue;
      state_->callbacks.push_back([callback = std::move(task.callback)] {
        callback(MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_SERVICE_STOPPING, "the coordinator is stopping"));
      });
    }
    std::erase_if(node.tasks, [](const auto& entry) { return entry.second.deadline.has_value(); });
  }
}

void Controller::RunTask(const std::string& node_id, v1::NodeTask task, std::chrono::milliseconds timeout,
                         TaskCallback callback) {
  Section section(*state_);
  const auto found = state_->nodes.find(node_id);
  const bool reachable = found != state_->nodes.end() && (found->second.node.state() == v1::NODE_STATE_READY ||
                                                          found->second.node.state() == v1::NODE_STATE_DRAINED);
  if (!reachable) {
    state_->callbacks.push_back([callback = std::move(callback), node_id] {
      callback(MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_NODE_NOT_FOUND,
                          fmt::format("node {} is not connected; `mbctl node ls` shows the nodes", node_id)));
    });
    return;
  }
  const std::string task_id = task.task_id();
  found->second.tasks[task_id] = PendingTask{std::move(task), std::move(callback), state_->Now() + timeout, state_->Now()};
  state_->notices.push_back({.job_id = {}, .node_id = node_id, .progress = {}});
}

}  // namespace mbridge::server
