// Error checks of the CUDA code. Every runtime call goes through MB_CUDA, every launch is followed by MB_CUDA_LAUNCHED().
#pragma once

#include <cuda_runtime.h>

#include "engine/core/error.h"

namespace mbridge::cuda {

// Throws REASON_OUT_OF_MEMORY or REASON_ENGINE_ERROR naming the call and CUDA's message.
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  const v1::Reason reason = error == cudaErrorMemoryAllocation ? v1::REASON_OUT_OF_MEMORY : v1::REASON_ENGINE_ERROR;
  throw EngineError(reason, fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

}  // namespace mbridge::cuda

#define MB_CUDA(call) ::mbridge::cuda::Check((call), #call)
#define MB_CUDA_LAUNCHED() ::mbridge::cuda::Check(cudaGetLastError(), __func__)
