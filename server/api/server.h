// The coordinator as an object: store, controller, metrics and the gRPC server over them.
//
// Start -> (serves) -> Stop. Stop says NOT_SERVING, ends the streams, waits for running calls and leaves jobs running.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/api/feed.h"
#include "server/api/recipe_source.h"
#include "server/api/submit.h"
#include "server/auth/credentials.h"
#include "server/metrics/service_metrics.h"
#include "server/nodes/controller.h"
#include "server/store/store.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace mbridge::server {

class AgentCalls;

struct ServerOptions {
  std::string state_directory;
  std::vector<std::string> listen;            // HOST:PORT or unix:PATH; port 0 takes a free one.
  std::string metrics_listen = "none";        // HOST:PORT or "none".
  std::vector<std::string> checkpoint_roots;  // Empty: <state>/runs.
  std::vector<std::string> data_roots;
  TlsFiles tls;
  std::string version, build_id;
  std::string local_hostname;  // Its agent is ended by AdminService.Shutdown; empty: none is.
  std::chrono::milliseconds stop_grace{10'000};
  std::chrono::milliseconds preflight_timeout{20'000};
  std::chrono::milliseconds min_ping_interval{10'000};  // Clients that ping an idle stream more often are cut off.
  std::chrono::milliseconds node_wait{0};               // See Submitter::Options.
  Controller::Options controller;                       // Times; directories and ids are filled in.
};

// "unix:<state>/coordinator.sock", where every coordinator listens.
std::string LocalAddress(const std::string& state_directory);

class Server {
 public:
  // Errors: those of Store::Open; UNAVAILABLE PORT_IN_USE.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options, RecipeSource recipes);
  ~Server();  // Stops.

  void Stop();
  bool exit_requested() const { return exit_requested_; }   // AdminService.Shutdown has ended the jobs.
  bool shutting_down() const { return shutting_down_; }     // From its begin on.
  const std::vector<int>& ports() const { return ports_; }  // Of `listen`; 1 for unix sockets.
  Controller* controller() { return controller_.get(); }
  Store* store() { return store_.get(); }
  ServiceMetrics* metrics() { return metrics_.get(); }

 private:
  Server(ServerOptions options, RecipeSource recipes);
  absl::Status Open();
  absl::Status Listen();
  void Run();  // The ticking thread.
  void EndAllJobs(std::chrono::seconds grace, std::function<void(int)> done);
  bool WaitForJobs(std::chrono::seconds longest);
  void EndLocalAgent();

  ServerOptions options_;
  const RecipeSource recipes_;
  std::unique_ptr<ServiceMetrics> metrics_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Controller> controller_;
  std::unique_ptr<Submitter> submitter_;
  Feed feed_;
  std::unique_ptr<AgentCalls> agents_;
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<grpc::Server> grpc_;
  std::vector<int> ports_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::atomic<bool> exit_requested_{false}, shutting_down_{false};
  std::thread ticker_, shutdown_;
};

}  // namespace mbridge::server
