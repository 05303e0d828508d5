#include "engine/optim/loss_scaler.h"

#include <gtest/gtest.h>

namespace mbridge {
namespace {

LossScalerOptions Dynamic() {
  return {.dynamic = true, .initial_scale = 4294967296.0f, .min_scale = 1, .growth_interval = 3, .hysteresis = 2};
}

TEST(LossScaler, OverflowsHalveAfterTheHysteresis) {
  LossScaler scaler(Dynamic());
  EXPECT_EQ(scaler.scale(), 0x1p32f);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 0x1p32f);  // The first one is tolerated.
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 0x1p31f);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 0x1p30f);  // Used up: each halves.
  scaler.Update(false);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 0x1p29f);  // A good step does not renew it…
  for (int i = 0; i < 3; ++i) scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 0x1p30f);  // …growth does.
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 0x1p30f);
}

TEST(LossScaler, GrowsOnlyAfterConsecutiveGoodSteps) {
  LossScaler scaler(Dynamic());
  scaler.Update(false);
  scaler.Update(false);
  scaler.Update(true);
  scaler.Update(false);
  scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 0x1p32f);
  scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 0x1p33f);
  EXPECT_EQ(scaler.inverse_scale(), 0x1p-33f);
}

TEST(LossScaler, NeverBelowTheMinimum) {
  LossScalerOptions options = Dynamic();
  options.initial_scale = 4;
  options.min_scale = 2;
  LossScaler scaler(options);
  for (int i = 0; i < 10; ++i) scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 2.0f);
}

TEST(LossScaler, ConstantScaleStays) {
  LossScaler scaler({.dynamic = false, .initial_scale = 12.0f});
  for (int i = 0; i < 10; ++i) scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 12.0f);
  EXPECT_EQ(scaler.inverse_scale(), static_cast<float>(1.0 / 12.0));
}

TEST(LossScaler, RestoredStateContinuesTheTrace) {
  LossScaler a(Dynamic()), b(Dynamic());
  const bool trace[] = {false, true, true, false, false, true, false, false, false, true, false};
  for (int i = 0; i < 5; ++i) a.Update(trace[i]);
  b.Restore(a.state());
  for (int i = 5; i < 11; ++i) {
    a.Update(trace[i]);
    b.Update(trace[i]);
    EXPECT_EQ(a.scale(), b.scale()) << i;
    EXPECT_EQ(a.state().growth_tracker, b.state().growth_tracker) << i;
  }
}

}  // namespace
}  // namespace mbridge
