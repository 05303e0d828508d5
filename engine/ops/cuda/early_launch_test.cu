// Needs no GPU: a block of 2048 threads starts on none.
#include "engine/ops/cuda/early_launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge::cuda {
namespace {

__global__ void CountKernel(int* count) {
  WaitForKernelsBefore();
  ++*count;
}

void CountTooMany() {
  LaunchEarly({.device = DeviceType::kCuda}, &CountKernel, 1, 2048, 0, nullptr);
  MB_CUDA_LAUNCHED();
}

TEST(EarlyLaunch, ThatFailsNamesFileAndOperator) {
  try {
    CountTooMany();
    FAIL() << "nothing was thrown";
  } catch (const EngineError& error) {
    EXPECT_EQ(error.reason(), v1::REASON_ENGINE_ERROR);
    EXPECT_THAT(error.what(),
                testing::ContainsRegex("a kernel at engine/ops/cuda/early_launch_test.cu:[0-9]+ in .*CountTooMany"));
  }
}

}  // namespace
}  // namespace mbridge::cuda
