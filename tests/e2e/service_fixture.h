// The real service in a private state directory: coordinator, local agent, ranks; mbctl and raw gRPC as clients.
//
// Every process that the service starts inherits MB_E2E_ID, by which the fixture finds them, checks for orphans and ends
// them all. Nothing here uses the client library: it is under test too.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>

#include "mbridge/v1/admin_service.grpc.pb.h"
#include "mbridge/v1/checkpoint_service.grpc.pb.h"
#include "mbridge/v1/job_service.grpc.pb.h"
#include "mbridge/v1/node_service.grpc.pb.h"
#include "tests/e2e/process.h"

namespace mbridge::e2e {

using Arguments = std::vector<std::string>;

std::filesystem::path Program(const std::string& name);  // build/bin/<name>

// Path of a scratch directory short enough for a unix socket; removed with everything in it at the end of its life.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class Service {
 public:
  struct Options {
    Arguments extra_arguments = {};
    std::map<std::string, std::string> environment = {};  // Of the coordinator, and so of agents and ranks.
    bool tcp = false;                                     // Also listens on a TCP port of loopback.
  };

  Service() : Service(Options()) {}
  explicit Service(Options options);
  ~Service();  // Kills every process of the service.

  // Starts the coordinator and waits until it serves. False with the log in log_text() when it did not.
  bool Start(Seconds timeout = Seconds(20));
  // One coordinator process with more arguments, not waited for: for start-up refusals.
  CommandResult RunCoordinator(const Arguments& arguments, Seconds timeout = Seconds(20)) const;
  Process& coordinator() { return coordinator_; }
  // One more agent with a state directory of its own, as on another machine.
  Process StartAgent(const std::string& name, const Arguments& arguments) const;

  const std::filesystem::path& directory() const { return scratch_.path(); }
  std::filesystem::path state_directory() const { return directory() / "state"; }
  std::string address() const { return "unix:" + (state_directory() / "coordinator.sock").string(); }
  std::string tcp_address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::string metrics_address() const { return "127.0.0.1:" + std::to_string(metrics_port_); }
  std::string Scrape() const;  // Text of /metrics; empty where nothing answers.
  std::string log_text() const;

  // mbctl with the server's address; never a terminal.
  CommandResult Mbctl(const Arguments& arguments, Seconds timeout = Seconds(60)) const;
  SpawnOptions MbctlOptions() const;

  // Processes of the service by program name ("mbrank"), all when empty.
  std::vector<pid_t> Pids(const std::string& program = "") const;
  // True when no process of the program is left within the time.
  bool NoneLeft(const std::string& program, Seconds timeout = Seconds(10)) const;

  v1::JobService::Stub& jobs();
  v1::CheckpointService::Stub& checkpoints();
  v1::NodeService::Stub& nodes();
  v1::AdminService::Stub& admin();

  v1::Job GetJob(const std::string& job_id);
  // Waits for the predicate on the job; the last state seen either way. Survives a coordinator that is away.
  v1::Job WaitForJob(const std::string& job_id, const std::function<bool(const v1::Job&)>& predicate,
                     Seconds timeout = Seconds(60));
  v1::Job WaitForEnd(const std::string& job_id, Seconds timeout = Seconds(90));
  // Waits until the job has finished the training step.
  v1::Job WaitForStep(const std::string& job_id, int64_t step, Seconds timeout = Seconds(60));
  // All training points in stored order.
  std::vector<v1::MetricPoint> TrainPoints(const std::string& job_id, bool effective = false);
  std::vector<v1::MetricPoint> Points(const std::string& job_id, v1::MetricKind kind, bool effective = false);
  std::vector<v1::Checkpoint> Checkpoints(const std::string& run_name);
  std::vector<v1::JobEvent> Events(const std::string& job_id);

  // mbctl submit with the arguments; the job id. Fails the test where it is refused.
  std::string Submit(const Arguments& arguments);

 private:
  std::shared_ptr<grpc::Channel> channel();
  void ResetChannel();

  ScratchDirectory scratch_;
  Options options_;
  std::string id_;
  int port_ = 0;
  int metrics_port_ = 0;
  Process coordinator_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::CheckpointService::Stub> checkpoints_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

// Arguments of a job of one layer that trains `iterations` steps in about a second, besides `more`.
Arguments TinyJob(int iterations, const Arguments& more = {});
// As TinyJob, with about `step_ms` milliseconds a step, to be caught in the middle.
Arguments SlowJob(int iterations, const Arguments& more = {});

bool Terminal(v1::JobState state);

// Steps 1..last, each once, in order; the failure text names the first that is not.
testing::AssertionResult CompleteSeries(const std::vector<v1::MetricPoint>& points, int64_t last);
// Equal steps and losses to the last bit.
testing::AssertionResult SameLosses(const std::vector<v1::MetricPoint>& a, const std::vector<v1::MetricPoint>& b);
// No gap and no duplicate in the sequence numbers of stored events; at most one terminal state, and nothing after it.
testing::AssertionResult SoundEvents(const std::vector<v1::JobEvent>& events);

MATCHER_P(Exited, code, "") { return arg.exit_code == code; }

}  // namespace mbridge::e2e
