#include "engine/train/operator_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "engine/ops/gemm.h"
#include "engine/ops/scale.h"

namespace mbridge {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(OperatorProfile, CountsCallsAndTheirWorkAfterTheFirstIterations) {
  const Context context;
  std::vector<float> a(64 * 32, 1.0f), b(16 * 32, 1.0f), c(64 * 16);
  const auto matrix = [](std::vector<float>& data, int64_t cols) {
    return Matrix{data.data(), DType::kF32, static_cast<int64_t>(data.size()) / cols, cols, cols};
  };
  const Tensor sums{c.data(), DType::kF32, DeviceType::kCpu, {64, 16}};
  std::string table;
  {
    OperatorProfile profile(context, {.operations_per_ms = 1e9, .copy_bytes_per_ms = 1e9});
    for (int i = 0; i < 5; ++i) {
      Gemm(context, matrix(a, 32), matrix(b, 32), matrix(c, 16), {.transpose_b = true});
      if (i < 3) Scale(context, sums, 2.0f, DType::kF32, sums);
      profile.NextIteration();
    }
    table = profile.Table();
  }
  const auto restored = Gemm.cpu;
  {
    const OperatorProfile again(context, {});
    EXPECT_NE(Gemm.cpu, restored);
  }
  EXPECT_EQ(Gemm.cpu, restored);
  EXPECT_THAT(table, HasSubstr("mean of 2 iterations"));
  EXPECT_THAT(table, HasSubstr("product into F32 [64, 16], inner 32"));
  EXPECT_THAT(table, HasSubstr("between these operators"));
  EXPECT_THAT(table, Not(HasSubstr("scale")));
}

TEST(OperatorProfile, LimitsAreMeasured) {
  const DeviceLimits limits = MeasureLimits({});
  EXPECT_GT(limits.operations_per_ms, 1e5);
  EXPECT_GT(limits.copy_bytes_per_ms, 1e5);
}

}  // namespace
}  // namespace mbridge
