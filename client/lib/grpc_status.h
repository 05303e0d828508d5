// grpc::Status -> absl::Status with the google.rpc details that the server attached.
#pragma once

#include "absl/status/status.h"

namespace grpc {
class Status;
}

namespace mbridge::client {

absl::Status FromGrpc(const grpc::Status& status);

}  // namespace mbridge::client
