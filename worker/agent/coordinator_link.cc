#include "worker/agent/coordinator_link.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "mbridge/v1/agent_service.grpc.pb.h"
#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"

namespace mbridge::agent {
namespace {

constexpr int kMaxMessageBytes = 16 << 20;

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace

struct CoordinatorLink::Connection {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::unique_ptr<v1::AgentService::Stub> stub;
};

struct CoordinatorLink::Call {
  grpc::ClientContext context;
  v1::SyncRequest request;
  v1::SyncResponse response;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<grpc::Status> status;
};

CoordinatorLink::CoordinatorLink(LinkOptions options)
    : options_(std::move(options)), connection_(std::make_unique<Connection>()) {}

CoordinatorLink::~CoordinatorLink() {
  if (call_ == nullptr) return;
  call_->context.TryCancel();
  std::unique_lock<std::mutex> lock(call_->mutex);
  call_->changed.wait(lock, [this] { return call_->status.has_value(); });
}

absl::StatusOr<std::unique_ptr<CoordinatorLink>> CoordinatorLink::Open(const LinkOptions& options) {
  if (options.target.empty())
    return absl::InvalidArgumentError("--coordinator: an address is needed, for example unix:/run/mbridge/coordinator.sock");
  if (options.tls_cert.empty() != options.tls_key.empty())
    return absl::InvalidArgumentError("--tls-cert and --tls-key come together");
  if (options.tls_ca.empty() && !options.tls_cert.empty()) return absl::InvalidArgumentError("--tls-cert needs --tls-ca");
  std::unique_ptr<CoordinatorLink> link(new CoordinatorLink(options));
  MB_RETURN_IF_ERROR(link->LoadCredentials());
  link->Connect();
  return link;
}

absl::Status CoordinatorLink::LoadCredentials() {
  if (options_.tls_ca.empty()) {
    connection_->credentials = grpc::InsecureChannelCredentials();
    return absl::OkStatus();
  }
  grpc::SslCredentialsOptions ssl;
  MB_ASSIGN_OR_RETURN(ssl.pem_root_certs, spool::ReadFile(options_.tls_ca));
  if (!options_.tls_cert.empty()) {
    MB_ASSIGN_OR_RETURN(ssl.pem_cert_chain, spool::ReadFile(options_.tls_cert));
    MB_ASSIGN_OR_RETURN(ssl.pem_private_key, spool::ReadFile(options_.tls_key));
  }
  connection_->credentials = grpc::SslCredentials(ssl);
  return absl::OkStatus();
}

void CoordinatorLink::Connect() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // Else a new channel shares the dead connection.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  connection_->stub = v1::AgentService::NewStub(grpc::CreateCustomChannel(options_.target, connection_->credentials, arguments));
}

void CoordinatorLink::StartSync(const v1::SyncRequest& request, std::chrono::milliseconds deadline) {
  call_ = std::make_unique<Call>();
  call_->request = request;
  call_->context.set_deadline(std::chrono::system_clock::now() + deadline);
  Call* call = call_.get();
  connection_->stub->async()->Sync(&call->context, &call->request, &call->response, [call](grpc::Status status) {
    // Notified under the lock: as soon as that is free, the call may be deleted.
    std::lock_guard<std::mutex> lock(call->mutex);
    call->status = std::move(status);
    call->changed.notify_all();
  });
}

void CoordinatorLink::Wait(std::chrono::milliseconds limit) {
  if (call_ == nullptr) return std::this_thread::sleep_for(limit);
  std::unique_lock<std::mutex> lock(call_->mutex);
  call_->changed.wait_for(lock, limit, [this] { return call_->status.has_value(); });
}

std::optional<absl::StatusOr<v1::SyncResponse>> CoordinatorLink::TakeAnswer() {
  if (call_ == nullptr) return std::nullopt;
  {
    std::lock_guard<std::mutex> lock(call_->mutex);
    if (!call_->status.has_value()) return std::nullopt;
  }
  const std::unique_ptr<Call> call = std::move(call_);
  if (call->status->ok()) return absl::StatusOr<v1::SyncResponse>(std::move(call->response));
  Connect();
  return absl::StatusOr<v1::SyncResponse>(FromGrpc(*call->status));
}

}  // namespace mbridge::agent
