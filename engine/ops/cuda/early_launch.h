// Kernels whose start falls into the end of the kernel before (programmatic dependent launch): launching takes microseconds, as
// much as a tenth of a small operator.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {

// Lets the next kernel of the stream, if it was launched for that (LaunchEarly), take free multiprocessors before this one ends.
__device__ __forceinline__ void StartNextKernel() { asm volatile("griddepcontrol.launch_dependents;"); }
// Until all kernels before have ended and what they wrote is seen: before an early kernel's first read or write.
__device__ __forceinline__ void WaitForKernelsBefore() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Launches a kernel that begins with WaitForKernelsBefore: its start falls into the end of the one before. As after any launch
// MB_CUDA_LAUNCHED() follows, where file and operator are known.
template <class... Parameters>
void LaunchEarly(const Context& context, void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared,
                 std::type_identity_t<Parameters>... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = StreamOf(context);
  config.attrs = &early;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace mbridge::cuda
