#include "client/lib/grpc_status.h"

#include <grpcpp/support/status.h>

#include "proto/rpc/status_details.h"

namespace mbridge::client {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status rpc;
  // Details of another form (a proxy's, say) are dropped; code and message are always gRPC's own.
  if (!rpc.ParseFromString(status.error_details())) rpc.Clear();
  rpc.set_code(static_cast<int>(status.error_code()));
  rpc.set_message(status.error_message());
  const bool too_large = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && rpc.details().empty() &&
                         status.error_message().find("larger than max") != std::string::npos;
  if (too_large) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_REQUEST_TOO_LARGE, status.error_message());
  }
  return FromRpcStatus(rpc);
}

}  // namespace mbridge::client
