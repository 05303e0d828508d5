#include "engine/core/gpu_architectures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

using testing::HasSubstr;

bool Runs(int capability, std::string_view built) { return WhyNoKernels("GPU", capability, built).empty(); }

TEST(GpuArchitectures, MachineCodeRunsOnItsMajorNumberFromItsMinorOneOn) {
  EXPECT_TRUE(Runs(90, "90-real"));
  EXPECT_FALSE(Runs(80, "90-real"));
  EXPECT_FALSE(Runs(100, "90-real"));
  EXPECT_TRUE(Runs(89, "86-real"));
  EXPECT_FALSE(Runs(80, "86-real"));
  EXPECT_TRUE(Runs(121, "120-real"));
  EXPECT_FALSE(Runs(120, "12-real"));
}

TEST(GpuArchitectures, WithAnAItRunsOnItsOwnAlone) {
  EXPECT_TRUE(Runs(90, "90a-real"));
  EXPECT_FALSE(Runs(103, "100a-real"));
  EXPECT_FALSE(Runs(103, "100a"));
  EXPECT_TRUE(Runs(103, "100f-real"));
  EXPECT_FALSE(Runs(120, "100f"));
}

TEST(GpuArchitectures, PtxRunsOnAllLaterOnes) {
  EXPECT_TRUE(Runs(100, "90"));
  EXPECT_TRUE(Runs(121, "80-virtual"));
  EXPECT_FALSE(Runs(80, "90"));
}

TEST(GpuArchitectures, AnyOfAListIsEnough) {
  EXPECT_TRUE(Runs(80, "80-real,90-real"));
  EXPECT_TRUE(Runs(90, "80-real,90-real"));
  EXPECT_FALSE(Runs(100, "80-real,90-real"));
}

TEST(GpuArchitectures, WhatIsNotKnownRefusesNothing) {
  EXPECT_TRUE(Runs(80, ""));
  EXPECT_TRUE(Runs(0, "90-real"));
  EXPECT_TRUE(Runs(80, "all"));
}

TEST(GpuArchitectures, TheRefusalNamesTheGpuTheBuildAndTheNextStep) {
  EXPECT_EQ(WhyNoKernels("NVIDIA A100-SXM4-80GB", 80, "90-real"),
            "NVIDIA A100-SXM4-80GB has compute capability 8.0; this build has kernels for 9.0: no build can use a GPU older than "
            "9.0: use --device cpu");
  EXPECT_THAT(
      WhyNoKernels("NVIDIA B200", 100, "80-real,90-real"),
      HasSubstr("capability 10.0; this build has kernels for 8.0, 9.0: rebuild with -DCMAKE_CUDA_ARCHITECTURES=100 or use "
                "--device cpu"));
  EXPECT_THAT(WhyNoKernels("GPU", 80, "90"), HasSubstr("for 9.0 and later: "));
}

// What CMake was told reaches the code in a form that is understood.
TEST(GpuArchitectures, ThisBuildsListIsUnderstood) {
  const std::string_view built = BuiltGpuArchitectures();
  if (built.empty()) GTEST_SKIP() << "this build has no CUDA code";
  EXPECT_FALSE(Runs(10, built)) << built;
}

}  // namespace
}  // namespace mbridge
