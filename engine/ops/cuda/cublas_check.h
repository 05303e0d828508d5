// Error check of cuBLASLt calls: throws EngineError, OUT_OF_MEMORY where the library could not allocate.
#pragma once

#include <cublasLt.h>

#include <string>

#include "engine/core/cuda/check.h"

namespace mbridge::cuda {

[[noreturn]] inline void ThrowCublas(cublasStatus_t status, const std::string& what) {
  ThrowFailure(status == CUBLAS_STATUS_ALLOC_FAILED, fmt::format("{}: {}", what, cublasLtGetStatusString(status)));
}

inline void CheckCublas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) ThrowCublas(status, what);
}

}  // namespace mbridge::cuda

#define MB_CUBLAS(call) ::mbridge::cuda::CheckCublas((call), #call)
