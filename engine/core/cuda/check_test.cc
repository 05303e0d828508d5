// Needs no GPU.
#include "engine/core/cuda/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

template <class F> EngineError ErrorOf(F&& f) {
  try {
    f();
  } catch (const EngineError& error) {
    return error;
  }
  return {v1::REASON_UNSPECIFIED, "nothing was thrown"};
}

TEST(CudaCheck, MissingMemoryIsAReasonOfItsOwnAndSaysWhatIsFree) {
  const EngineError error = ErrorOf([] { MB_CUDA(cudaErrorMemoryAllocation); });
  EXPECT_EQ(error.reason(), v1::REASON_OUT_OF_MEMORY);
  EXPECT_THAT(error.what(), HasSubstr("cudaErrorMemoryAllocation: out of memory"));
  EXPECT_THAT(error.what(), HasSubstr("free"));
}

TEST(CudaCheck, OtherErrorsAreTheEngines) {
  const EngineError error = ErrorOf([] { MB_CUDA(cudaErrorIllegalAddress); });
  EXPECT_EQ(error.reason(), v1::REASON_ENGINE_ERROR);
  EXPECT_THAT(error.what(), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_THAT(error.what(), Not(HasSubstr("free")));
  EXPECT_NO_THROW(MB_CUDA(cudaSuccess));
}

TEST(CudaCheck, AMissingDriverOrGpuIsNamedWithTheNextStep) {
  const std::string none = WhyNoGpu(cudaErrorInsufficientDriver, 0, 13000, nullptr);
  EXPECT_THAT(none, AllOf(HasSubstr("no NVIDIA driver (libcuda.so.1)"), HasSubstr("CUDA 13.0"), HasSubstr("--device cpu")));
  const std::string old = WhyNoGpu(cudaErrorInsufficientDriver, 12080, 13000, nullptr);
  EXPECT_THAT(old, AllOf(HasSubstr("driver is for CUDA 12.8"), HasSubstr("CUDA 13.0"), HasSubstr("newer")));
  EXPECT_THAT(WhyNoGpu(cudaErrorStubLibrary, 13000, 13000, nullptr), HasSubstr("LD_LIBRARY_PATH"));
  EXPECT_THAT(WhyNoGpu(cudaErrorNoDevice, 13000, 13000, nullptr), HasSubstr("CUDA_VISIBLE_DEVICES is not set"));
  EXPECT_THAT(WhyNoGpu(cudaErrorNoDevice, 13000, 13000, "7"), AllOf(HasSubstr("is '7'"), HasSubstr("nvidia-smi")));
  EXPECT_EQ(WhyNoGpu(cudaErrorMemoryAllocation, 13000, 13000, nullptr), "");
}

TEST(CudaCheck, AGpuWithoutRoomForAContextIsNotAMissingOne) {
  EXPECT_EQ(ErrorOf([] { ThrowNoGpu(cudaErrorMemoryAllocation, "start"); }).reason(), v1::REASON_OUT_OF_MEMORY);
  EXPECT_EQ(ErrorOf([] { ThrowNoGpu(cudaErrorInsufficientDriver, "start"); }).reason(), v1::REASON_ENGINE_ERROR);
}

TEST(CudaCheck, ALaunchNamesFileLineAndOperator) {
  const EngineError error =
      ErrorOf([] { CheckLaunch(cudaErrorInvalidConfiguration, "/builds/engine/1/engine/ops/cuda/gelu.cu", 57, "void Gelu()"); });
  EXPECT_EQ(error.reason(), v1::REASON_ENGINE_ERROR);
  EXPECT_THAT(error.what(), HasSubstr("a kernel at engine/ops/cuda/gelu.cu:57 in void Gelu(): "));
  EXPECT_NO_THROW(CheckLaunch(cudaSuccess, "", 0, ""));
}

}  // namespace
}  // namespace mbridge::cuda
