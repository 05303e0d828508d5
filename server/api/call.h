// One unary call: size limit, handler, status with details, metric.
#pragma once

#include <grpcpp/grpcpp.h>

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/rpc/status_details.h"
#include "server/api/grpc_status.h"
#include "server/metrics/service_metrics.h"

namespace mbridge::server {

// Requests of clients. gRPC itself takes up to kMaxWireBytes, so that the refusal of a larger one can say its reason;
// an agent's Sync may use all of it.
inline constexpr size_t kMaxRequestBytes = 4 << 20;
inline constexpr int kMaxWireBytes = 16 << 20;

template <class Request> absl::Status CheckRequestSize(const Request& request) {
  const size_t bytes = request.ByteSizeLong();
  if (bytes <= kMaxRequestBytes) return absl::OkStatus();
  return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_REQUEST_TOO_LARGE,
                    fmt::format("the request has {} bytes, at most {} are allowed", bytes, kMaxRequestBytes));
}

// Finishes a call from any thread, once; what calls `Done` may outlive the handler.
class PendingCall {
 public:
  PendingCall(grpc::CallbackServerContext* context, const char* method, ServiceMetrics* metrics)
      : reactor_(context->DefaultReactor()), method_(method), metrics_(metrics) {
    metrics->CallStarted();
  }
  void Done(const absl::Status& status) const {
    metrics_->GrpcHandled(method_, CodeName(status.code()));
    reactor_->Finish(ToGrpc(status));
  }
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

 private:
  grpc::ServerUnaryReactor* reactor_;
  const char* method_;
  ServiceMetrics* metrics_;
};

// `handler` fills the response at once.
template <class Request, class Handler>
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const char* method, ServiceMetrics* metrics,
                                 const Request& request, Handler handler) {
  const PendingCall call(context, method, metrics);
  const absl::Status size = CheckRequestSize(request);
  call.Done(size.ok() ? handler() : size);
  return call.reactor();
}

}  // namespace mbridge::server
