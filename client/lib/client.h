// The client library: typed calls to a coordinator, with deadlines, retries and streams that survive a restart of it.
//
//   MB_ASSIGN_OR_RETURN(auto options, client::LoadConnectionOptions({}));
//   MB_ASSIGN_OR_RETURN(auto client, client::Client::Connect(options));
//   MB_ASSIGN_OR_RETURN(auto created, client->CreateJob(request));
//   MB_ASSIGN_OR_RETURN(auto end, client->WatchJob(created.job().job_id(), 0, print_event));
//   return client::ExitCodeOf(end);
//
// Errors are absl::Status with the server's reason and field violations (proto/rpc/status_details.h); ExitCodeOf maps
// them. Thread-safe: one Client may serve many threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/lib/connection.h"
#include "mbridge/v1/admin_service.pb.h"
#include "mbridge/v1/checkpoint_service.pb.h"
#include "mbridge/v1/job_service.pb.h"
#include "mbridge/v1/node_service.pb.h"
#include "mbridge/v1/recipe_service.pb.h"

namespace mbridge::client {

// A random UUID (version 4).
std::string MakeRequestId();

class Client {
 public:
  // Reads the certificate files; connects lazily. INVALID_ARGUMENT for an unreadable file.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ConnectionOptions options);
  ~Client();

  const ConnectionOptions& options() const;

  // Jobs. An empty request_id is filled in, so that a repeat after UNAVAILABLE cannot start a second job.
  absl::StatusOr<v1::CreateJobResponse> CreateJob(v1::CreateJobRequest request);
  absl::StatusOr<v1::Job> GetJob(const std::string& job_id);
  // Newest first, through all pages up to `limit` jobs.
  absl::StatusOr<std::vector<v1::Job>> ListJobs(const std::string& filter, int limit);
  absl::StatusOr<v1::Job> CancelJob(const std::string& job_id, bool kill);

  // Recipes.
  absl::StatusOr<std::vector<v1::Recipe>> ListRecipes();
  absl::StatusOr<v1::ShowRecipeResponse> ShowRecipe(const v1::ShowRecipeRequest& request);

  // Checkpoints.
  absl::StatusOr<std::vector<v1::Checkpoint>> ListCheckpoints(v1::ListCheckpointsRequest request);
  absl::StatusOr<v1::Checkpoint> GetCheckpoint(const std::string& checkpoint_id);
  absl::StatusOr<v1::VerifyCheckpointResponse> VerifyCheckpoint(const std::string& checkpoint_id);
  // Not repeated after UNAVAILABLE.
  absl::StatusOr<v1::Checkpoint> DeleteCheckpoint(const std::string& checkpoint_id, bool force);
  absl::StatusOr<v1::Checkpoint> PinCheckpoint(const std::string& checkpoint_id, bool pinned);

  // Nodes, server.
  absl::StatusOr<std::vector<v1::Node>> ListNodes();
  absl::StatusOr<v1::Node> DrainNode(const std::string& node_id, bool drain, const std::string& reason);
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo();
  // Not repeated after UNAVAILABLE.
  absl::StatusOr<v1::ShutdownResponse> Shutdown(int grace_seconds);

  // Streams. A lost connection is taken up again after the last message seen, so each callback sees every event,
  // byte and point once and in order. The follow forms return only with the server's end message, with an error of the
  // server, with CANCELLED after `stop`, or with UNAVAILABLE ("connection lost, job state unknown") when nothing came
  // for options().lost_after. Callbacks run in the calling thread.
  absl::StatusOr<v1::StreamEnd> WatchJob(const std::string& job_id, int64_t after_sequence,
                                         const std::function<void(const v1::JobEvent&)>& on_event, std::stop_token stop = {});

  struct LogQuery {
    std::string job_id;
    int attempt = 0;  // 0: the newest.
    int rank = 0;
    int64_t offset = 0;  // -1: the last 64 KiB.
  };
  using LogSink = std::function<void(const std::string& bytes, int attempt)>;
  // With attempt 0 FollowLog goes on with later attempts until the job has ended; else until that attempt has.
  absl::Status ReadLog(const LogQuery& query, const LogSink& sink, std::stop_token stop = {});
  absl::StatusOr<v1::StreamEnd> FollowLog(const LogQuery& query, const LogSink& sink, std::stop_token stop = {});

  struct MetricQuery {
    std::string job_id;
    int attempt = 0;         // 0: all.
    bool effective = false;  // One point a step: the newest attempt that reached it.
  };
  absl::StatusOr<std::vector<v1::MetricPoint>> ReadMetrics(const MetricQuery& query, std::stop_token stop = {});
  absl::StatusOr<v1::StreamEnd> FollowMetrics(const MetricQuery& query,
                                              const std::function<void(const v1::MetricPoint&)>& on_point,
                                              std::stop_token stop = {});

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mbridge::client
