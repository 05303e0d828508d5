// For which GPUs the CUDA code of this build exists. Needs no CUDA.
#pragma once

#include <string>
#include <string_view>

namespace mbridge {

// CMAKE_CUDA_ARCHITECTURES of this build, separated by commas, as "90-real" or "80-real,90"; empty where it has no CUDA code.
std::string_view BuiltGpuArchitectures();

// Empty if code of `built` runs on a GPU of `compute_capability` (10 * major + minor, 0: not known), or where `built` is empty.
// Else a sentence with the GPU, what there is code for and what to do. Machine code (90, 90-real) runs on GPUs of its major
// number from its minor one on, with an `a` (90a-real) on its own alone; PTX (90, 90-virtual) on later ones too. From the CUDA
// C++ programming guide, "Binary Compatibility" and "PTX Compatibility".
std::string WhyNoKernels(std::string_view gpu_name, int compute_capability, std::string_view built);

}  // namespace mbridge
