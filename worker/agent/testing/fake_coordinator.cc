#include "worker/agent/testing/fake_coordinator.h"

#include <chrono>

namespace mbridge::agent::testing {

void FakeCoordinator::Start() {
  ++starts_;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_, grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

void FakeCoordinator::Stop() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  server_.reset();
}

void FakeCoordinator::Order(const std::string& job, int attempt, v1::DesiredState desired,
                            const std::vector<v1::RankSpec>& ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  v1::AttemptOrder& order = attempts_[{job, attempt}].order;
  order.set_job_id(job);
  order.set_attempt(attempt);
  order.set_desired(desired);
  for (const v1::RankSpec& rank : ranks) *order.add_ranks() = rank;
}

void FakeCoordinator::GiveKey(const std::string& job, int attempt, const std::string& key, const std::string& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  v1::RendezvousEntry* entry = attempts_[{job, attempt}].order.add_rendezvous();
  entry->set_key(key);
  entry->set_value(value);
}

void FakeCoordinator::AddTask(const v1::NodeTask& task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_[task.task_id()] = task;
}

AttemptView FakeCoordinator::View(const std::string& job, int attempt) {
  std::lock_guard<std::mutex> lock(mutex_);
  return attempts_[{job, attempt}];
}

bool FakeCoordinator::Knows(const std::string& job, int attempt) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::AttemptReport& report : last_request_.attempts()) {
    if (report.job_id() == job && report.attempt() == attempt) return true;
  }
  return false;
}

v1::SyncRequest FakeCoordinator::LastRequest() {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_request_;
}

std::map<std::string, v1::TaskResult> FakeCoordinator::Results() {
  std::lock_guard<std::mutex> lock(mutex_);
  return results_;
}

std::vector<std::string> FakeCoordinator::Complaints() {
  std::lock_guard<std::mutex> lock(mutex_);
  return complaints_;
}

int FakeCoordinator::syncs() {
  std::lock_guard<std::mutex> lock(mutex_);
  return syncs_;
}

void FakeCoordinator::TakeReport(const v1::AttemptReport& report) {
  AttemptView& view = attempts_[{report.job_id(), report.attempt()}];
  view.last = report;
  ++view.reports;
  for (const v1::RankRecord& record : report.records()) {
    if (record.sequence() != view.records.size() + 1) {
      complaints_.push_back("record " + std::to_string(record.sequence()) + " after " + std::to_string(view.records.size()));
    }
    view.records.push_back(record);
  }
  for (const v1::LogChunk& chunk : report.logs()) {
    std::string& log = view.logs[chunk.rank()];
    if (chunk.offset() != static_cast<int64_t>(log.size()) + chunk.dropped_bytes()) {
      complaints_.push_back("log offset " + std::to_string(chunk.offset()) + " at " + std::to_string(log.size()));
    }
    log.append(static_cast<size_t>(chunk.dropped_bytes()), '?');
    log += chunk.data();
  }
  for (const v1::RendezvousEntry& entry : report.rendezvous()) view.rendezvous[entry.key()] = entry.value();
}

grpc::Status FakeCoordinator::Sync(grpc::ServerContext*, const v1::SyncRequest* request, v1::SyncResponse* response) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++syncs_;
  last_request_ = *request;
  for (const v1::AttemptReport& report : request->attempts()) TakeReport(report);
  for (const v1::TaskResult& result : request->results()) {
    results_[result.task_id()] = result;
    tasks_.erase(result.task_id());
    response->add_acknowledged_results(result.task_id());
  }
  for (const auto& [key, view] : attempts_) {
    if (view.order.desired() == v1::DESIRED_STATE_UNSPECIFIED) continue;
    v1::AttemptOrder* order = response->add_orders();
    *order = view.order;
    if (view.reports > 0) order->clear_ranks();
    order->set_acknowledged_records(view.records.size());
    for (const auto& [rank, log] : view.logs) {
      v1::LogAck* ack = order->add_logs();
      ack->set_rank(rank);
      ack->set_offset(static_cast<int64_t>(log.size()));
    }
  }
  for (const auto& [id, task] : tasks_) *response->add_tasks() = task;
  response->set_coordinator_instance("start " + std::to_string(starts_));
  return grpc::Status::OK;
}

}  // namespace mbridge::agent::testing
