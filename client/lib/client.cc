#include "client/lib/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <thread>

#include "client/lib/backoff.h"
#include "client/lib/channel.h"
#include "client/lib/grpc_status.h"
#include "proto/rpc/status_details.h"

namespace mbridge::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr size_t kMaxRequestBytes = 4 << 20;
constexpr int kPageSize = 500;
constexpr seconds kVerifyDeadline(3600);  // Reads every byte of a checkpoint.

enum class Repeat { kAfterUnavailable, kNever };

absl::Status Unreachable(const ConnectionOptions& options, const grpc::Status& status) {
  return absl::UnavailableError(
      fmt::format("no coordinator answers at {} ({}): {}", options.server, options.origin, status.error_message()));
}

// One unary call: deadline per try, jittered repeats of UNAVAILABLE within options.retry_for.
template <class Response, class Request, class Stub>
absl::StatusOr<Response> Call(const ConnectionOptions& options, Stub* stub,
                              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const Request& request, Repeat repeat = Repeat::kAfterUnavailable,
                              milliseconds deadline = milliseconds(0)) {
  if (const size_t bytes = request.ByteSizeLong(); bytes > kMaxRequestBytes) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_REQUEST_TOO_LARGE,
                      fmt::format("the request has {} bytes, at most {} are allowed", bytes, kMaxRequestBytes));
  }
  if (deadline.count() == 0) deadline = options.call_deadline;
  const auto give_up = Clock::now() + options.retry_for;
  Backoff backoff;
  for (bool told = false;;) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + deadline);
    Response response;
    const grpc::Status status = (stub->*method)(&context, request, &response);
    if (status.ok()) return response;
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED && status.error_details().empty()) {
      return absl::DeadlineExceededError(fmt::format("{} did not answer within {} s", options.server, deadline.count() / 1000.0));
    }
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return FromGrpc(status);
    const absl::Status unavailable = status.error_details().empty() ? Unreachable(options, status) : FromGrpc(status);
    const milliseconds wait = backoff.Next();
    if (repeat == Repeat::kNever || Clock::now() + wait > give_up) return unavailable;
    if (!told && options.on_retry) options.on_retry(fmt::format("no answer from {}, trying again", options.server));
    told = true;
    std::this_thread::sleep_for(wait);
  }
}

}  // namespace

std::string MakeRequestId() {
  std::random_device device;
  std::string id;
  for (int i = 0; i < 32; ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) id += '-';
    unsigned digit = device() & 15u;
    if (i == 12) digit = 4;
    if (i == 16) digit = 8 | (digit & 3);
    id += "0123456789abcdef"[digit];
  }
  return id;
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ConnectionOptions options) {
  auto impl = std::make_unique<Impl>();
  MB_ASSIGN_OR_RETURN(impl->channel, MakeChannel(options));
  impl->options = std::move(options);
  impl->jobs = v1::JobService::NewStub(impl->channel);
  impl->recipes = v1::RecipeService::NewStub(impl->channel);
  impl->checkpoints = v1::CheckpointService::NewStub(impl->channel);
  impl->nodes = v1::NodeService::NewStub(impl->channel);
  impl->admin = v1::AdminService::NewStub(impl->channel);
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

const ConnectionOptions& Client::options() const { return impl_->options; }

absl::StatusOr<v1::CreateJobResponse> Client::CreateJob(v1::CreateJobRequest request) {
  if (request.request_id().empty()) request.set_request_id(MakeRequestId());
  return Call(impl_->options, impl_->jobs.get(), &v1::JobService::Stub::CreateJob, request);
}

absl::StatusOr<v1::Job> Client::GetJob(const std::string& job_id) {
  v1::GetJobRequest request;
  request.set_job_id(job_id);
  MB_ASSIGN_OR_RETURN(auto response, Call(impl_->options, impl_->jobs.get(), &v1::JobService::Stub::GetJob, request));
  return std::move(*response.mutable_job());
}

absl::StatusOr<std::vector<v1::Job>> Client::ListJobs(const std::string& filter, int limit) {
  std::vector<v1::Job> jobs;
  v1::ListJobsRequest request;
  request.set_filter(filter);
  while (static_cast<int>(jobs.size()) < limit) {
    request.set_page_size(std::min<int>(kPageSize, limit - static_cast<int>(jobs.size())));
    MB_ASSIGN_OR_RETURN(auto response, Call(impl_->options, impl_->jobs.get(), &v1::JobService::Stub::ListJobs, request));
    for (auto& job : *response.mutable_jobs()) jobs.push_back(std::move(job));
    if (response.next_page_token().empty()) break;
    request.set_page_token(response.next_page_token());
  }
  return jobs;
}

absl::StatusOr<v1::Job> Client::CancelJob(const std::string& job_id, bool kill) {
  v1::CancelJobRequest request;
  request.set_job_id(job_id);
  request.set_kill(kill);
  MB_ASSIGN_OR_RETURN(auto response, Call(impl_->options, impl_->jobs.get(), &v1::JobService::Stub::CancelJob, request));
  return std::move(*response.mutable_job());
}

absl::StatusOr<std::vector<v1::Recipe>> Client::ListRecipes() {
  MB_ASSIGN_OR_RETURN(
      auto response, Call(impl_->options, impl_->recipes.get(), &v1::RecipeService::Stub::ListRecipes, v1::ListRecipesRequest()));
  return std::vector<v1::Recipe>(response.recipes().begin(), response.recipes().end());
}

absl::StatusOr<v1::ShowRecipeResponse> Client::ShowRecipe(const v1::ShowRecipeRequest& request) {
  return Call(impl_->options, impl_->recipes.get(), &v1::RecipeService::Stub::ShowRecipe, request);
}

absl::StatusOr<std::vector<v1::Checkpoint>> Client::ListCheckpoints(v1::ListCheckpointsRequest request) {
  std::vector<v1::Checkpoint> checkpoints;
  request.set_page_size(kPageSize);
  for (;;) {
    MB_ASSIGN_OR_RETURN(auto response,
                        Call(impl_->options, impl_->checkpoints.get(), &v1::CheckpointService::Stub::ListCheckpoints, request));
    for (auto& checkpoint : *response.mutable_checkpoints()) checkpoints.push_back(std::move(checkpoint));
    if (response.next_page_token().empty()) return checkpoints;
    request.set_page_token(response.next_page_token());
  }
}

absl::StatusOr<v1::Checkpoint> Client::GetCheckpoint(const std::string& checkpoint_id) {
  v1::GetCheckpointRequest request;
  request.set_checkpoint_id(checkpoint_id);
  MB_ASSIGN_OR_RETURN(auto response,
                      Call(impl_->options, impl_->checkpoints.get(), &v1::CheckpointService::Stub::GetCheckpoint, request));
  return std::move(*response.mutable_checkpoint());
}

absl::StatusOr<v1::VerifyCheckpointResponse> Client::VerifyCheckpoint(const std::string& checkpoint_id) {
  v1::VerifyCheckpointRequest request;
  request.set_checkpoint_id(checkpoint_id);
  return Call(impl_->options, impl_->checkpoints.get(), &v1::CheckpointService::Stub::VerifyCheckpoint, request,
              Repeat::kAfterUnavailable, kVerifyDeadline);
}

absl::StatusOr<v1::Checkpoint> Client::DeleteCheckpoint(const std::string& checkpoint_id, bool force) {
  v1::DeleteCheckpointRequest request;
  request.set_checkpoint_id(checkpoint_id);
  request.set_force(force);
  MB_ASSIGN_OR_RETURN(auto response, Call(impl_->options, impl_->checkpoints.get(),
                                          &v1::CheckpointService::Stub::DeleteCheckpoint, request, Repeat::kNever));
  return std::move(*response.mutable_checkpoint());
}

absl::StatusOr<v1::Checkpoint> Client::PinCheckpoint(const std::string& checkpoint_id, bool pinned) {
  v1::PinCheckpointRequest request;
  request.set_checkpoint_id(checkpoint_id);
  request.set_pinned(pinned);
  MB_ASSIGN_OR_RETURN(auto response,
                      Call(impl_->options, impl_->checkpoints.get(), &v1::CheckpointService::Stub::PinCheckpoint, request));
  return std::move(*response.mutable_checkpoint());
}

absl::StatusOr<std::vector<v1::Node>> Client::ListNodes() {
  std::vector<v1::Node> nodes;
  v1::ListNodesRequest request;
  request.set_page_size(kPageSize);
  for (;;) {
    MB_ASSIGN_OR_RETURN(auto response, Call(impl_->options, impl_->nodes.get(), &v1::NodeService::Stub::ListNodes, request));
    for (auto& node : *response.mutable_nodes()) nodes.push_back(std::move(node));
    if (response.next_page_token().empty()) return nodes;
    request.set_page_token(response.next_page_token());
  }
}

absl::StatusOr<v1::Node> Client::DrainNode(const std::string& node_id, bool drain, const std::string& reason) {
  v1::DrainNodeRequest request;
  request.set_node_id(node_id);
  request.set_drain(drain);
  request.set_reason(reason);
  MB_ASSIGN_OR_RETURN(auto response, Call(impl_->options, impl_->nodes.get(), &v1::NodeService::Stub::DrainNode, request));
  return std::move(*response.mutable_node());
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo() {
  return Call(impl_->options, impl_->admin.get(), &v1::AdminService::Stub::GetServerInfo, v1::GetServerInfoRequest());
}

absl::StatusOr<v1::ShutdownResponse> Client::Shutdown(int grace_seconds) {
  v1::ShutdownRequest request;
  request.set_grace_seconds(grace_seconds);
  const seconds deadline((grace_seconds > 0 ? grace_seconds : 30) + 60);
  return Call(impl_->options, impl_->admin.get(), &v1::AdminService::Stub::Shutdown, request, Repeat::kNever, deadline);
}

}  // namespace mbridge::client
