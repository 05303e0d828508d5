#include "engine/core/cuda/check.h"

#include <cstdlib>
#include <string_view>

namespace mbridge::cuda {
namespace {

std::string Version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

}  // namespace

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

std::string WhyNoGpu(cudaError_t error, int driver, int runtime, const char* visible) {
  const char* const without = "--device cpu, or the program mbrank, trains without a GPU";
  switch (error) {
    case cudaErrorInsufficientDriver:
      if (driver == 0) {
        return fmt::format(
            "there is no NVIDIA driver (libcuda.so.1), and this program needs one for CUDA {} or later: install it, or give the "
            "container its GPUs (--gpus all); {}",
            Version(runtime), without);
      }
      return fmt::format(
          "the NVIDIA driver is for CUDA {}, and this program needs one for CUDA {} or later: install a newer one; {}",
          Version(driver), Version(runtime), without);
    case cudaErrorStubLibrary:
      return fmt::format(
          "libcuda.so.1 is the CUDA toolkit's stub, not a driver: take its stubs folder out of LD_LIBRARY_PATH; {}", without);
    case cudaErrorNoDevice:
      return fmt::format("no GPU is visible (CUDA_VISIBLE_DEVICES is {}): nvidia-smi lists those of this machine; {}",
                         visible == nullptr ? "not set" : fmt::format("'{}'", visible), without);
    default: return "";
  }
}

void ThrowNoGpu(cudaError_t error, const std::string& what) {
  int driver = 0, runtime = 0;
  cudaGetLastError();
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = CUDART_VERSION;
  const std::string why = WhyNoGpu(error, driver, runtime, std::getenv("CUDA_VISIBLE_DEVICES"));
  if (why.empty()) ThrowCuda(error, what);
  throw EngineError(v1::REASON_ENGINE_ERROR, why);
}

void ThrowLaunch(cudaError_t error, const char* file, int line, const char* function) {
  std::string_view place(file);
  if (const size_t root = place.rfind("engine/"); root != std::string_view::npos) place.remove_prefix(root);
  ThrowCuda(error, fmt::format("the launch of a kernel at {}:{} in {}", place, line, function));
}

}  // namespace mbridge::cuda
