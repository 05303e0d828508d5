// absl::Status as grpc::Status: the details travel as google.rpc.Status in grpc-status-details-bin.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace mbridge::server {

grpc::Status ToGrpc(const absl::Status& status);
// "INVALID_ARGUMENT", for the metric label.
const char* CodeName(absl::StatusCode code);

}  // namespace mbridge::server
