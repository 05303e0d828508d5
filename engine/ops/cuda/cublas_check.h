// Error check of cuBLASLt calls.
#pragma once

#include <cublasLt.h>

#include "engine/core/error.h"

namespace mbridge::cuda {

inline void CheckCublas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) ThrowEngineError("{}: {}", what, cublasLtGetStatusString(status));
}

}  // namespace mbridge::cuda

#define MB_CUBLAS(call) ::mbridge::cuda::CheckCublas((call), #call)
