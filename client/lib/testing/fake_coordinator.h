// A coordinator for tests: a real gRPC server on a unix socket whose answers are functions that the test sets.
#pragma once

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "client/lib/connection.h"
#include "mbridge/v1/admin_service.grpc.pb.h"
#include "mbridge/v1/checkpoint_service.grpc.pb.h"
#include "mbridge/v1/job_service.grpc.pb.h"
#include "mbridge/v1/node_service.grpc.pb.h"
#include "mbridge/v1/recipe_service.grpc.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge::client::testing {

inline grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message()), ToRpcStatus(status).SerializeAsString()};
}

template <class Request, class Response> using Unary = std::function<grpc::Status(const Request&, Response*)>;
template <class Request, class Response>
using Streaming = std::function<grpc::Status(grpc::ServerContext*, const Request&, grpc::ServerWriter<Response>*)>;

// Calls `handler` or says UNIMPLEMENTED.
template <class Handler, class... Arguments> grpc::Status Dispatch(const Handler& handler, Arguments&&... arguments) {
  if (!handler) return {grpc::StatusCode::UNIMPLEMENTED, "the test does not expect this call"};
  return handler(std::forward<Arguments>(arguments)...);
}

class FakeJobs : public v1::JobService::Service {
 public:
  Unary<v1::CreateJobRequest, v1::CreateJobResponse> create;
  Unary<v1::GetJobRequest, v1::GetJobResponse> get;
  Unary<v1::ListJobsRequest, v1::ListJobsResponse> list;
  Unary<v1::CancelJobRequest, v1::CancelJobResponse> cancel;
  Streaming<v1::WatchJobRequest, v1::WatchJobResponse> watch;
  Streaming<v1::TailLogsRequest, v1::TailLogsResponse> logs;
  Streaming<v1::StreamMetricsRequest, v1::StreamMetricsResponse> metrics;

  grpc::Status CreateJob(grpc::ServerContext*, const v1::CreateJobRequest* q, v1::CreateJobResponse* r) override {
    return Dispatch(create, *q, r);
  }
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* q, v1::GetJobResponse* r) override {
    return Dispatch(get, *q, r);
  }
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* q, v1::ListJobsResponse* r) override {
    return Dispatch(list, *q, r);
  }
  grpc::Status CancelJob(grpc::ServerContext*, const v1::CancelJobRequest* q, v1::CancelJobResponse* r) override {
    return Dispatch(cancel, *q, r);
  }
  grpc::Status WatchJob(grpc::ServerContext* c, const v1::WatchJobRequest* q,
                        grpc::ServerWriter<v1::WatchJobResponse>* w) override {
    return Dispatch(watch, c, *q, w);
  }
  grpc::Status TailLogs(grpc::ServerContext* c, const v1::TailLogsRequest* q,
                        grpc::ServerWriter<v1::TailLogsResponse>* w) override {
    return Dispatch(logs, c, *q, w);
  }
  grpc::Status StreamMetrics(grpc::ServerContext* c, const v1::StreamMetricsRequest* q,
                             grpc::ServerWriter<v1::StreamMetricsResponse>* w) override {
    return Dispatch(metrics, c, *q, w);
  }
};

class FakeCheckpoints : public v1::CheckpointService::Service {
 public:
  Unary<v1::ListCheckpointsRequest, v1::ListCheckpointsResponse> list;
  Unary<v1::GetCheckpointRequest, v1::GetCheckpointResponse> get;
  Unary<v1::VerifyCheckpointRequest, v1::VerifyCheckpointResponse> verify;

  grpc::Status ListCheckpoints(grpc::ServerContext*, const v1::ListCheckpointsRequest* q,
                               v1::ListCheckpointsResponse* r) override {
    return Dispatch(list, *q, r);
  }
  grpc::Status GetCheckpoint(grpc::ServerContext*, const v1::GetCheckpointRequest* q, v1::GetCheckpointResponse* r) override {
    return Dispatch(get, *q, r);
  }
  grpc::Status VerifyCheckpoint(grpc::ServerContext*, const v1::VerifyCheckpointRequest* q,
                                v1::VerifyCheckpointResponse* r) override {
    return Dispatch(verify, *q, r);
  }
};

class FakeNodes : public v1::NodeService::Service {
 public:
  Unary<v1::ListNodesRequest, v1::ListNodesResponse> list;
  grpc::Status ListNodes(grpc::ServerContext*, const v1::ListNodesRequest* q, v1::ListNodesResponse* r) override {
    return Dispatch(list, *q, r);
  }
};

class FakeCoordinator {
 public:
  FakeJobs jobs;
  FakeCheckpoints checkpoints;
  FakeNodes nodes;

  FakeCoordinator() {
    static std::atomic<int> count{0};
    path_ = "/tmp/mb-fake-" + std::to_string(getpid()) + "-" + std::to_string(count++) + ".sock";
  }
  ~FakeCoordinator() { Stop(); }

  void Start() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address(), grpc::InsecureServerCredentials());
    builder.RegisterService(&jobs);
    builder.RegisterService(&checkpoints);
    builder.RegisterService(&nodes);
    server_ = builder.BuildAndStart();
  }
  // Breaks every stream, as kill -9 would.
  void Stop() {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    unlink(path_.c_str());
  }
  std::string address() const { return "unix:" + path_; }

  // Short times, so that a lost connection is found within a test.
  ConnectionOptions Options() const {
    ConnectionOptions options;
    options.server = address();
    options.origin = "test";
    options.call_deadline = std::chrono::milliseconds(5000);
    options.retry_for = std::chrono::milliseconds(1000);
    options.silence_limit = std::chrono::milliseconds(1500);
    options.lost_after = std::chrono::milliseconds(2000);
    return options;
  }

 private:
  std::string path_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace mbridge::client::testing
