// Error checks of the CUDA code. Every runtime call goes through MB_CUDA, every launch is followed by MB_CUDA_LAUNCHED().
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "engine/core/error.h"

namespace mbridge::cuda {

// "of the GPU's memory 12 of 143771 MiB are free", for messages; says so where CUDA cannot tell.
std::string FreeMemoryText();

// Throws EngineError for a call of CUDA or a library that failed: REASON_OUT_OF_MEMORY, with FreeMemoryText,
// or REASON_ENGINE_ERROR.
[[noreturn]] void ThrowFailure(bool out_of_memory, const std::string& what);

// REASON_OUT_OF_MEMORY or REASON_ENGINE_ERROR, naming the call and CUDA's message.
[[noreturn]] void ThrowCuda(cudaError_t error, const std::string& what);

// Why the first GPU cannot be used, as a sentence that ends with what to do; empty for an error that says nothing about that.
// `driver` and `runtime`: as cudaDriverGetVersion (0: no driver) and cudaRuntimeGetVersion say. `visible`: CUDA_VISIBLE_DEVICES,
// null where it is not set.
std::string WhyNoGpu(cudaError_t error, int driver, int runtime, const char* visible);

// Throws REASON_ENGINE_ERROR with WhyNoGpu, or as ThrowCuda where that is empty.
[[noreturn]] void ThrowNoGpu(cudaError_t error, const std::string& what);

// Of a launch in `function`; of `file` the part below the repository's root is said.
[[noreturn]] void ThrowLaunch(cudaError_t error, const char* file, int line, const char* function);

inline void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) ThrowCuda(error, what);
}
inline void CheckLaunch(cudaError_t error, const char* file, int line, const char* function) {
  if (error != cudaSuccess) ThrowLaunch(error, file, line, function);
}

}  // namespace mbridge::cuda

#define MB_CUDA(call) ::mbridge::cuda::Check((call), #call)
// The function's long name tells the operators apart that launch through one template.
#define MB_CUDA_LAUNCHED() ::mbridge::cuda::CheckLaunch(cudaGetLastError(), __FILE__, __LINE__, __PRETTY_FUNCTION__)
