#include "engine/core/cuda_sincos.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

namespace mbridge {
namespace {

TEST(CudaSinCosTest, NearTheTrueFunctions) {
  double worst = 0;
  for (int i = 0; i <= 200000; ++i) {
    const float x = static_cast<float>(6.2831853 * i / 200000);
    float sine, cosine;
    CudaFastSinCos(x, &sine, &cosine);
    worst = std::max(
        {worst, std::fabs(sine - std::sin(static_cast<double>(x))), std::fabs(cosine - std::cos(static_cast<double>(x)))});
  }
  EXPECT_LT(worst, 8e-7);
  EXPECT_GT(worst, 1e-7);  // It is not the exact function.
}

// Outputs of an H200.
TEST(CudaSinCosTest, OfTheDevice) {
  struct Case {
    float x, sine, cosine;
  };
  for (const Case& c : {Case{0.392699122f, 0.382683426f, 0.923879504f}, Case{0.000374507043f, 0.000374334864f, 0.999999881f},
                        Case{3.1415925f, 1.87261321e-07f, -1.0f}}) {
    float sine, cosine;
    CudaFastSinCos(c.x, &sine, &cosine);
    EXPECT_NEAR(sine, c.sine, 1e-9f + 6e-8f * std::fabs(c.sine));
    EXPECT_NEAR(cosine, c.cosine, 6e-8f);
  }
  // The argument 2 pi rounded up still lies below a full turn for the unit.
  float sine, cosine;
  CudaFastSinCos(6.28318548f, &sine, &cosine);
  EXPECT_NEAR(sine, -1.873e-7f, 1e-9f);
}

}  // namespace
}  // namespace mbridge
