#include "server/api/server.h"

#include <fmt/format.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <future>

#include "proto/rpc/status_details.h"
#include "server/api/call.h"
#include "server/api/services.h"
#include "server/nodes/names.h"

namespace mbridge::server {
namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::seconds kStreamTick{1};
constexpr std::chrono::milliseconds kStopPoll{10};
constexpr std::chrono::milliseconds kFlush{200};  // For the last answers to leave.
constexpr size_t kLongestSocketPath = 107;
constexpr const char* kServices[] = {"mbridge.v1.JobService",    "mbridge.v1.CheckpointService", "mbridge.v1.NodeService",
                                     "mbridge.v1.RecipeService", "mbridge.v1.AdminService",      "mbridge.v1.AgentService"};

void SetKeepalive(grpc::ServerBuilder* builder, std::chrono::milliseconds min_ping_interval) {
  // gRPC's own minimum is 5 minutes: it would close the connection of a follower for "too many pings".
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, static_cast<int>(min_ping_interval.count()));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Finds clients that vanished without closing.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
}

void SetServing(grpc::Server* server, bool serving) {
  auto* health = server->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);  // "" and every service known so far.
  for (const char* service : kServices) health->SetServingStatus(service, serving);
}

}  // namespace

std::string LocalAddress(const std::string& state_directory) { return fmt::format("unix:{}/coordinator.sock", state_directory); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options, RecipeSource recipes) {
  std::unique_ptr<Server> server(new Server(std::move(options), std::move(recipes)));
  MB_RETURN_IF_ERROR(server->Open());
  MB_RETURN_IF_ERROR(server->Listen());
  return server;
}

Server::Server(ServerOptions options, RecipeSource recipes) : options_(std::move(options)), recipes_(std::move(recipes)) {}

absl::Status Server::Open() {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(options_.state_directory, error);
  if (error) return absl::FailedPreconditionError(fmt::format("--state-dir {}: {}", options_.state_directory, error.message()));
  if (options_.checkpoint_roots.empty()) options_.checkpoint_roots = {options_.state_directory + "/runs"};
  for (const std::string& root : options_.checkpoint_roots) {
    if (!fs::path(root).is_absolute())
      return absl::FailedPreconditionError(fmt::format("--checkpoint-root {} must be absolute", root));
    fs::create_directories(root, error);
    if (error) return absl::FailedPreconditionError(fmt::format("--checkpoint-root {}: {}", root, error.message()));
  }
  metrics_ = std::make_unique<ServiceMetrics>(options_.version, options_.build_id);
  MB_ASSIGN_OR_RETURN(store_,
                      Store::Open({.directory = options_.state_directory + "/store",
                                   .on_write = [metrics = metrics_.get()](double seconds) { metrics->StoreWrite(seconds); },
                                   .testing_env = nullptr}));
  for (const std::string& row : store_->Quarantined()) spdlog::error("store: row {} does not parse and was moved aside", row);
  Controller::Options controller = options_.controller;
  controller.log_directory = options_.state_directory + "/logs";
  controller.instance_id = NewId("c-");
  controller.build_id = options_.build_id;
  options_.controller = controller;
  MB_ASSIGN_OR_RETURN(controller_, Controller::Create(controller, store_.get(), metrics_.get()));
  submitter_ = std::make_unique<Submitter>(Submitter::Options{options_.checkpoint_roots, options_.data_roots, options_.build_id,
                                                              options_.preflight_timeout, options_.node_wait},
                                           recipes_, controller_.get(), store_.get());
  return absl::OkStatus();
}

absl::Status Server::Listen() {
  if (options_.metrics_listen != "none") MB_RETURN_IF_ERROR(metrics_->Serve(options_.metrics_listen));
  const ServiceContext context{store_.get(), controller_.get(), metrics_.get(), submitter_.get(), &recipes_, &feed_};
  v1::GetServerInfoResponse info;
  info.set_version(options_.version);
  info.set_build_id(options_.build_id);
  info.set_instance_id(options_.controller.instance_id);
  info.set_state_directory(options_.state_directory);
  for (const auto& root : options_.checkpoint_roots) info.add_checkpoint_roots(root);
  for (const auto& root : options_.data_roots) info.add_data_roots(root);
  if (options_.metrics_listen != "none") info.set_metrics_address(options_.metrics_listen);
  info.set_store_version(kStoreVersion);
  agents_ = MakeAgentService(context);
  services_.push_back(MakeJobService(context));
  services_.push_back(MakeCheckpointService(context));
  services_.push_back(MakeNodeService(context));
  services_.push_back(MakeRecipeService(context));
  services_.push_back(MakeAdminService(
      context, info, [this](std::chrono::seconds grace, std::function<void(int)> done) { EndAllJobs(grace, std::move(done)); }));
  controller_->SetListener([this](const Controller::Notice& notice) {
    if (!notice.job_id.empty()) {
      feed_.Notify(notice.job_id, notice.progress);
      changed_.notify_all();
    }
    if (!notice.node_id.empty()) agents_->NodeChanged(notice.node_id);
  });

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetKeepalive(&builder, options_.min_ping_interval);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // A second server on the port is an error, not a partner.
  builder.SetMaxReceiveMessageSize(kMaxWireBytes);
  builder.SetMaxSendMessageSize(4 * kMaxWireBytes);
  ports_.assign(options_.listen.size(), 0);
  for (size_t i = 0; i < options_.listen.size(); ++i) {
    const std::string& address = options_.listen[i];
    if (address.starts_with("unix:") && address.size() - 5 > kLongestSocketPath) {
      return absl::FailedPreconditionError(
          fmt::format("{} is longer than the {} characters of a socket path; choose a shorter "
                      "--state-dir",
                      address.substr(5), kLongestSocketPath));
    }
    MB_ASSIGN_OR_RETURN(const auto credentials, CredentialsFor(address, options_.tls));
    builder.AddListeningPort(address, credentials, &ports_[i]);
  }
  builder.RegisterService(agents_->service());
  for (const auto& service : services_) builder.RegisterService(service.get());
  grpc_ = builder.BuildAndStart();
  for (size_t i = 0; i < ports_.size(); ++i) {
    if (grpc_ != nullptr && ports_[i] != 0) continue;
    if (ports_[i] != 0) continue;
    return MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_PORT_IN_USE,
                      fmt::format("cannot listen on {}; stop the process that uses the address or choose another --listen",
                                  options_.listen[i]));
  }
  if (grpc_ == nullptr) return absl::InternalError("the gRPC server did not start");
  SetServing(grpc_.get(), true);
  ticker_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void Server::Run() {
  auto next_streams = std::chrono::steady_clock::now() + kStreamTick;
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    lock.unlock();
    controller_->Tick();
    agents_->Tick();
    submitter_->Tick();
    if (std::chrono::steady_clock::now() >= next_streams) {
      next_streams += kStreamTick;
      feed_.Tick();
    }
    lock.lock();
    const auto until = std::chrono::steady_clock::now() + kTick;
    while (!stopped_ && std::chrono::steady_clock::now() < until) changed_.wait_until(lock, until);
  }
}

void Server::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
  }
  changed_.notify_all();
  if (ticker_.joinable()) ticker_.join();
  if (grpc_ != nullptr) {
    SetServing(grpc_.get(), false);
    feed_.Stop();
    agents_->Stop();
    submitter_->Stop();
    controller_->AbandonTasks();
    // gRPC itself would also wait for idle connections, whose clients may not look at them for long.
    const auto until = std::chrono::steady_clock::now() + options_.stop_grace;
    while (metrics_->open_calls() > 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(kStopPoll);
    grpc_->Shutdown(std::chrono::system_clock::now() + kFlush);
  }
  if (shutdown_.joinable()) shutdown_.join();
}

Server::~Server() {
  Stop();
  if (controller_ != nullptr) controller_->SetListener(nullptr);
  grpc_.reset();
}

// --- AdminService.Shutdown.

void Server::EndAllJobs(std::chrono::seconds grace, std::function<void(int)> done) {
  if (shutting_down_.exchange(true)) return done(0);
  std::lock_guard lock(mutex_);
  shutdown_ = std::thread([this, grace, done = std::move(done)] {
    controller_->RefuseNewJobs();
    const std::vector<std::string> jobs = controller_->LiveJobs();
    const auto stop_all = [&](bool kill) {
      for (const std::string& job_id : controller_->LiveJobs()) {
        const auto stopped = controller_->StopJob(job_id, kill, v1::REASON_SHUTDOWN);
        if (!stopped.ok()) spdlog::warn("stopping job {}: {}", job_id, std::string(stopped.status().message()));
      }
    };
    stop_all(false);
    if (!WaitForJobs(grace)) {
      stop_all(true);
      constexpr std::chrono::seconds kKillTime{30};
      if (!WaitForJobs(kKillTime)) spdlog::warn("{} jobs could not be ended", controller_->LiveJobs().size());
    }
    EndLocalAgent();
    done(static_cast<int>(jobs.size() - controller_->LiveJobs().size()));
    exit_requested_ = true;
  });
}

bool Server::WaitForJobs(std::chrono::seconds longest) {
  const auto until = std::chrono::steady_clock::now() + longest;
  while (!controller_->LiveJobs().empty()) {
    std::unique_lock lock(mutex_);
    if (stopped_ || std::chrono::steady_clock::now() >= until) return false;
    changed_.wait_for(lock, kTick);
  }
  return true;
}

void Server::EndLocalAgent() {
  if (options_.local_hostname.empty()) return;
  for (const v1::Node& node : controller_->ListNodes()) {
    if (node.inventory().hostname() != options_.local_hostname) continue;
    v1::NodeTask task;
    task.set_task_id(NewId("shutdown-"));
    task.mutable_shutdown();
    constexpr std::chrono::seconds kAgentTime{10};
    auto ended = std::make_shared<std::promise<void>>();
    controller_->RunTask(node.node_id(), std::move(task), kAgentTime,
                         [ended](const absl::StatusOr<v1::TaskResult>&) { ended->set_value(); });
    // Longer than the task's own deadline, which a stopping server no longer watches.
    ended->get_future().wait_for(kAgentTime + std::chrono::seconds(1));
  }
}

}  // namespace mbridge::server
