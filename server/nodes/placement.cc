// Time: placing waiting jobs, lost nodes, ends of grace and of wall time, gauges.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "proto/rpc/status_details.h"
#include "server/nodes/controller_state.h"
#include "server/nodes/rank_specs.h"
#include "server/scheduler/schedule.h"

namespace mbridge::server {

// --- Placement.

std::vector<NodeSlots> Controller::State::Slots() const {
  std::set<std::string> gpus_used, cpu_used;
  const auto use = [&](const v1::Attempt& attempt) {
    for (const auto& place : attempt.placement())
      (place.gpu_uuid().empty() ? cpu_used : gpus_used).insert(place.gpu_uuid().empty() ? place.node_id() : place.gpu_uuid());
  };
  for (const auto& [job_id, job] : live) {
    if (const v1::Attempt* attempt = CurrentAttempt(job.job)) use(*attempt);
  }
  // Processes of an attempt that is over for its job hold their slots until their agent has reaped them.
  for (const auto& [node_id, node] : nodes) {
    for (const auto& reported : node.reported) {
      if (reported.ended) continue;
      const auto found = live.find(reported.job_id);
      const auto job = found == live.end() ? store->GetJob(reported.job_id) : absl::StatusOr<v1::Job>(found->second.job);
      if (!job.ok() || reported.attempt < 1 || reported.attempt > job->attempts_size()) continue;
      use(job->attempts(reported.attempt - 1));
    }
  }
  std::vector<NodeSlots> slots;
  for (const auto& [node_id, node] : nodes) {
    NodeSlots slot;
    slot.node_id = node_id;
    slot.cpu_cores = node.node.inventory().cpu_cores();
    slot.cpu_busy = cpu_used.contains(node_id);
    slot.accepts = node.node.state() == v1::NODE_STATE_READY;
    for (const auto& gpu : node.node.inventory().gpus()) {
      slot.gpus.push_back(gpu.uuid());
      if (!gpus_used.contains(gpu.uuid())) slot.free_gpus.push_back(gpu.uuid());
    }
    slots.push_back(std::move(slot));
  }
  return slots;
}

void Controller::State::SchedulePass() {
  schedule_dirty = false;
  const Monotonic now = Now();
  std::vector<WaitingJob> waiting;
  for (const auto& [job_id, job] : live) {
    if (job.job.state() != v1::JOB_STATE_QUEUED || now < job.not_before) continue;
    const v1::JobSpec& spec = job.job.spec();
    waiting.push_back({.job_id = job_id,
                       .ranks = std::max(1, job.job.resolved().ranks()),
                       .device = spec.device(),
                       .priority = spec.priority(),
                       .age = now - job.queued_since});
  }
  if (waiting.empty()) return;
  const auto started = std::chrono::steady_clock::now();
  const Schedule schedule = MakeSchedule(std::move(waiting), Slots());
  metrics->SchedulePass(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  for (const Placement& placement : schedule.placements) Place(live.at(placement.job_id), placement);
  for (const Waiting& why : schedule.waiting) {
    LiveJob& job = live.at(why.job_id);
    job.job.set_queue_position(why.position);
    if (job.job.reason() == why.reason && job.job.detail() == why.detail) continue;
    Change change = Begin(job);
    SetState(&change, v1::JOB_STATE_QUEUED, why.reason, why.detail);
    if (!Apply(std::move(change)).ok()) return;
  }
}

void Controller::State::Place(LiveJob& job, const Placement& placement) {
  Change change = Begin(job);
  const auto source = SourceOf(job.job);
  if (!source.ok()) {
    SetState(&change, v1::JOB_STATE_FAILED, ReasonOf(source.status()), std::string(source.status().message()));
    Apply(std::move(change)).IgnoreError();  // Logged there; the job is still queued.
    return;
  }
  v1::Attempt* attempt = change.job.add_attempts();
  attempt->set_attempt(change.job.attempts_size());
  *attempt->mutable_start_time() = WallNow();
  if (source->has_value()) {
    attempt->set_from_checkpoint_id((*source)->checkpoint_id());
    attempt->set_first_step((*source)->step());
  }
  std::set<std::string> node_ids;
  for (size_t rank = 0; rank < placement.ranks.size(); ++rank) {
    const RankSlot& slot = placement.ranks[rank];
    v1::RankPlacement* place = attempt->add_placement();
    place->set_rank(static_cast<int>(rank));
    place->set_node_id(slot.node_id);
    place->set_local_rank(slot.local_rank);
    place->set_gpu_uuid(slot.gpu_uuid);
    place->set_threads(slot.threads);
    node_ids.insert(slot.node_id);
  }
  change.job.set_queue_position(0);
  const bool first = !change.job.has_start_time();
  if (first) *change.job.mutable_start_time() = WallNow();
  SetState(&change, v1::JOB_STATE_STARTING, v1::REASON_UNSPECIFIED,
           fmt::format("attempt {}: {} rank{} on {}{}", attempt->attempt(), placement.ranks.size(),
                       placement.ranks.size() == 1 ? "" : "s", fmt::join(node_ids, ", "),
                       source->has_value() ? " from checkpoint " + (*source)->checkpoint_id() : ""));
  if (!Apply(std::move(change)).ok()) {
    schedule_dirty = true;
    return;
  }
  job.parts.clear();
  for (const auto& node_id : node_ids) job.parts[node_id] = {};
  if (first) {
    job.started = Now();
    metrics->JobStarted(std::chrono::duration<double>(Now() - job.queued_since).count());
  }
  NotifyNodesOf(job);
}

// The last committed checkpoint of the job itself; before its first one, what it was started from.
absl::StatusOr<std::optional<v1::Checkpoint>> Controller::State::SourceOf(const v1::Job& job) const {
  MB_ASSIGN_OR_RETURN(const auto checkpoints, store->ListCheckpoints(job.run_name()));
  for (auto checkpoint = checkpoints.rbegin(); checkpoint != checkpoints.rend(); ++checkpoint) {
    if (checkpoint->job_id() == job.job_id() && checkpoint->state() == v1::CHECKPOINT_STATE_COMMITTED) return *checkpoint;
  }
  const std::string& start = job.spec().start().checkpoint_id();
  if (start.empty()) return std::optional<v1::Checkpoint>();
  MB_ASSIGN_OR_RETURN(const v1::Checkpoint checkpoint, store->GetCheckpoint(start));
  if (checkpoint.state() == v1::CHECKPOINT_STATE_COMMITTED) return checkpoint;
  return MakeStatus(
      absl::StatusCode::kDataLoss,
      checkpoint.state() == v1::CHECKPOINT_STATE_CORRUPT ? v1::REASON_CHECKPOINT_CORRUPT : v1::REASON_CHECKPOINT_NOT_FOUND,
      fmt::format("checkpoint {}, from which the job starts, is not usable any more: {}", start, checkpoint.detail()));
}

std::vector<v1::RankSpec> Controller::State::SpecsFor(const LiveJob& job, const std::string& node_id) const {
  std::vector<v1::RankSpec> specs;
  const v1::Attempt& attempt = *CurrentAttempt(job.job);
  const auto resolved = store->GetResolved(job.job.job_id());
  if (!resolved.ok()) {
    spdlog::error("job {}: {}", job.job.job_id(), std::string(resolved.status().message()));
    return specs;
  }
  std::optional<v1::Checkpoint> source;
  if (!attempt.from_checkpoint_id().empty()) {
    auto found = store->GetCheckpoint(attempt.from_checkpoint_id());
    if (!found.ok()) return specs;
    source = std::move(found).value();
  }
  for (const auto& place : attempt.placement()) {
    if (place.node_id() != node_id) continue;
    specs.push_back(MakeRankSpec(job.job, attempt, place, *resolved, source ? &*source : nullptr, options.build_id));
    specs.back().set_gpus(Gpus());
  }
  return specs;
}

int Controller::State::Gpus() const {
  int gpus = 0;
  for (const auto& [node_id, node] : nodes) {
    if (node.node.state() == v1::NODE_STATE_READY) gpus += node.node.inventory().gpus_size();
  }
  return gpus;
}

int Controller::Gpus() const {
  std::lock_guard lock(state_->mutex);
  return state_->Gpus();
}

std::string Controller::WhyNeverFits(int ranks, v1::Device device) const {
  std::lock_guard lock(state_->mutex);
  auto slots = state_->Slots();
  std::erase_if(slots, [&](const NodeSlots& slot) { return state_->nodes.at(slot.node_id).node.inventory().cpu_cores() == 0; });
  if (slots.empty()) return {};
  WaitingJob job;
  job.ranks = ranks;
  job.device = device;
  return server::WhyNeverFits(job, slots);
}

std::optional<v1::Node> Controller::PreflightNode(v1::Device device) const {
  std::lock_guard lock(state_->mutex);
  const NodeEntry* best = nullptr;
  const auto capacity = [&](const NodeEntry& node) {
    const v1::NodeInventory& inventory = node.node.inventory();
    return device == v1::DEVICE_CUDA || (device == v1::DEVICE_UNSPECIFIED && inventory.gpus_size() > 0) ? inventory.gpus_size()
                                                                                                        : inventory.cpu_cores();
  };
  for (const auto& [node_id, node] : state_->nodes) {
    if (node.node.state() != v1::NODE_STATE_READY || capacity(node) == 0) continue;
    if (best == nullptr || capacity(node) > capacity(*best)) best = &node;
  }
  return best == nullptr ? std::nullopt : std::optional(best->node);
}

// --- Time.

void Controller::Tick() {
  Section section(*state_);
  State& state = *state_;
  const Monotonic now = state.Now();
  // A coordinator that was itself asleep (stopped, suspended) has not heard anybody; that is no fault of the nodes.
  constexpr std::chrono::seconds kAsleep{5};
  if (now - state.last_tick > kAsleep) {
    for (auto& [node_id, node] : state.nodes) node.last_report += now - state.last_tick;
  }
  state.last_tick = now;
  state.CheckNodes();
  state.CheckJobs();
  state.CheckTasks();
  if (state.schedule_dirty) state.SchedulePass();
  if (now - state.last_gauges >= std::chrono::seconds(1)) {
    state.last_gauges = now;
    state.UpdateGauges();
  }
}

void Controller::State::CheckNodes() {
  for (auto& [node_id, node] : nodes) {
    const auto silence = Now() - node.last_report;
    const v1::NodeState before = node.node.state();
    if (silence >= options.lost_after && before != v1::NODE_STATE_LOST) {
      node.node.set_state(v1::NODE_STATE_LOST);
      node.reported.clear();
      spdlog::warn("node {} is lost", node_id);
      std::vector<std::string> job_ids;
      for (const auto& [job_id, job] : live) {
        if (job.parts.contains(node_id)) job_ids.push_back(job_id);
      }
      for (const std::string& job_id : job_ids) {
        Change change = Begin(live.at(job_id));
        EndAttempt(&change,
                   {v1::REASON_NODE_LOST, fmt::format("node {} did not report for {} s", node_id,
                                                      std::chrono::duration_cast<std::chrono::seconds>(silence).count())});
        // Not stored: the node stays lost in memory, so that the next pass must come here again.
        if (!Apply(std::move(change)).ok()) node.node.set_state(v1::NODE_STATE_UNREACHABLE);
      }
    } else if (silence >= options.unreachable_after && before != v1::NODE_STATE_LOST && before != v1::NODE_STATE_UNREACHABLE) {
      node.node.set_state(v1::NODE_STATE_UNREACHABLE);
      schedule_dirty = true;
      spdlog::warn("node {} does not report", node_id);
    }
  }
}

void Controller::State::CheckJobs() {
  std::vector<std::string> over_time;
  for (auto& [job_id, job] : live) {
    if (job.job.state() == v1::JOB_STATE_QUEUED) {
      if (job.job.reason() == v1::REASON_WAITING_FOR_RETRY && Now() >= job.not_before) schedule_dirty = true;
    } else {
      const v1::DesiredState desired = DesiredFor(job);
      for (const auto& [node_id, part] : job.parts) {
        if (part.told != desired) notices.push_back({.job_id = {}, .node_id = node_id, .progress = {}});
      }
    }
    const int64_t limit = job.job.spec().wall_time_limit_seconds();
    const bool running = job.job.state() != v1::JOB_STATE_STOPPING;
    if (limit > 0 && running && job.started && Now() - *job.started >= std::chrono::seconds(limit)) over_time.push_back(job_id);
  }
  for (const std::string& job_id : over_time) {
    LiveJob& job = live.at(job_id);
    Stop(job, false, v1::REASON_WALL_TIME_EXCEEDED,
         fmt::format("the wall-time limit of {} s is over", job.job.spec().wall_time_limit_seconds()))
        .IgnoreError();
  }
}

void Controller::State::CheckTasks() {
  for (auto& [node_id, node] : nodes) {
    for (auto task = node.tasks.begin(); task != node.tasks.end();) {
      if (!task->second.deadline || Now() < *task->second.deadline) {
        ++task;
        continue;
      }
      callbacks.push_back([callback = std::move(task->second.callback), id = node_id] {
        callback(absl::DeadlineExceededError(fmt::format("node {} did not answer in time", id)));
      });
      task = node.tasks.erase(task);
    }
  }
}

void Controller::State::UpdateGauges() const {
  ServiceMetrics::JobCounts counts;
  for (const auto& [job_id, job] : live) ++counts[{job.job.state(), job.job.spec().kind()}];
  metrics->SetLiveJobs(counts);
  for (const auto& [node_id, node] : nodes) {
    const v1::Node described = Describe(node);
    metrics->SetNode(node_id, described.state(), described.inventory().gpus_size(), described.gpu_uuids_used_size(),
                     std::chrono::duration<double>(Now() - node.last_report).count());
  }
}

// --- Nodes as the API shows them.

v1::Node Controller::State::Describe(const NodeEntry& entry) const {
  v1::Node node = entry.node;
  for (const auto& [job_id, job] : live) {
    const v1::Attempt* attempt = CurrentAttempt(job.job);
    if (attempt == nullptr || !job.parts.contains(node.node_id())) continue;
    node.add_job_ids(job_id);
    for (const auto& place : attempt->placement()) {
      if (place.node_id() != node.node_id()) continue;
      if (place.gpu_uuid().empty()) {
        node.set_cpu_slots_used(node.cpu_slots_used() + place.threads());
      } else {
        node.add_gpu_uuids_used(place.gpu_uuid());
      }
    }
  }
  return node;
}

std::vector<v1::Node> Controller::ListNodes() const {
  std::lock_guard lock(state_->mutex);
  std::vector<v1::Node> nodes;
  for (const auto& [node_id, entry] : state_->nodes) nodes.push_back(state_->Describe(entry));
  return nodes;
}

absl::StatusOr<v1::Node> Controller::DrainNode(const std::string& node_id, bool drain, const std::string& reason) {
  Section section(*state_);
  const auto found = state_->nodes.find(node_id);
  if (found == state_->nodes.end()) {
    return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_NODE_NOT_FOUND,
                      fmt::format("there is no node {}; `mbctl node ls` lists the nodes", node_id));
  }
  NodeEntry& entry = found->second;
  Transition transition;
  v1::Node stored = entry.node;
  stored.set_drain_reason(drain ? reason : "");
  stored.set_state(drain ? v1::NODE_STATE_DRAINED : v1::NODE_STATE_READY);
  transition.nodes.push_back(stored);
  MB_RETURN_IF_ERROR(state_->store->Commit(transition));
  const bool away = entry.node.state() == v1::NODE_STATE_UNREACHABLE || entry.node.state() == v1::NODE_STATE_LOST;
  entry.drained = drain;
  entry.node.set_drain_reason(stored.drain_reason());
  if (!away) entry.node.set_state(stored.state());
  state_->schedule_dirty = true;
  return state_->Describe(entry);
}

}  // namespace mbridge::server
