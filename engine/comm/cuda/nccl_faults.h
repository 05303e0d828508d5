// What NCCL's result codes mean for a rank. NCCL names the call that failed in its last warning alone (ncclGetLastError):
// `detail`.
#pragma once

#include <nccl.h>

#include <string>

#include "mbridge/v1/reason.pb.h"

namespace mbridge::cuda {

// Of a result that is an error. As NCCL's guide defines them: ncclRemoteError is the network or a peer that ended (PEER_LOST);
// ncclUnhandledCudaError and ncclSystemError are calls of this process to CUDA and to the operating system: OUT_OF_MEMORY where
// the detail says that memory was missing, PEER_LOST where it names a connection, else ENGINE_ERROR.
v1::Reason ReasonOfNccl(ncclResult_t result, const std::string& detail);

// What to do about an error of this process's surroundings or start, as a clause that begins with "; "; empty where that is not
// known.
std::string NextStepOfNccl(ncclResult_t result, const std::string& detail);

}  // namespace mbridge::cuda
