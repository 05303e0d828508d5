#include "engine/core/cuda/check.h"

#include <string_view>

namespace mbridge::cuda {

std::string FreeMemoryText() {
  size_t free = 0, total = 0;
  cudaGetLastError();
  if (cudaMemGetInfo(&free, &total) == cudaSuccess)
    return fmt::format("of the GPU's memory {} of {} MiB are free", free >> 20, total >> 20);
  cudaGetLastError();
  return "how much GPU memory is free is not known";
}

void ThrowFailure(bool out_of_memory, const std::string& what) {
  if (!out_of_memory) throw EngineError(v1::REASON_ENGINE_ERROR, what);
  throw EngineError(v1::REASON_OUT_OF_MEMORY, fmt::format("{} ({})", what, FreeMemoryText()));
}

void ThrowCuda(cudaError_t error, const std::string& what) {
  ThrowFailure(error == cudaErrorMemoryAllocation,
               fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

void ThrowLaunch(cudaError_t error, const char* file, int line, const char* function) {
  std::string_view place(file);
  if (const size_t root = place.rfind("engine/"); root != std::string_view::npos) place.remove_prefix(root);
  ThrowCuda(error, fmt::format("the launch of a kernel at {}:{} in {}", place, line, function));
}

}  // namespace mbridge::cuda
