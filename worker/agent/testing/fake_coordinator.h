// An AgentService for tests: orders that the test sets, reports that it collects and checks for gaps and repetitions.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "mbridge/v1/agent_service.grpc.pb.h"

namespace mbridge::agent::testing {

struct AttemptView {
  v1::AttemptOrder order;  // What the agent is told, acknowledgements apart.
  v1::AttemptReport last;
  int reports = 0;
  std::vector<v1::RankRecord> records;
  std::map<int, std::string> logs;
  std::map<std::string, std::string> rendezvous;
};

// Thread-safe. Listens on `unix:<socket>`; Stop and Start simulate a coordinator that restarts with its state.
class FakeCoordinator final : public v1::AgentService::Service {
 public:
  using Key = std::pair<std::string, int>;

  explicit FakeCoordinator(std::string socket) : socket_(std::move(socket)) { Start(); }
  ~FakeCoordinator() override { Stop(); }

  void Start();
  void Stop();

  void Order(const std::string& job, int attempt, v1::DesiredState desired, const std::vector<v1::RankSpec>& ranks = {});
  void GiveKey(const std::string& job, int attempt, const std::string& key, const std::string& value);
  void AddTask(const v1::NodeTask& task);

  AttemptView View(const std::string& job, int attempt = 1);
  bool Knows(const std::string& job, int attempt = 1);  // In the last request.
  v1::SyncRequest LastRequest();
  std::map<std::string, v1::TaskResult> Results();
  // Reports that broke the protocol.
  std::vector<std::string> Complaints();
  int syncs();

  grpc::Status Sync(grpc::ServerContext*, const v1::SyncRequest* request, v1::SyncResponse* response) override;

 private:
  void TakeReport(const v1::AttemptReport& report);

  const std::string socket_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::map<Key, AttemptView> attempts_;
  std::map<std::string, v1::NodeTask> tasks_;
  std::map<std::string, v1::TaskResult> results_;
  std::vector<std::string> complaints_;
  v1::SyncRequest last_request_;
  int syncs_ = 0;
  int starts_ = 0;
};

}  // namespace mbridge::agent::testing
