#include "engine/ops/cuda/trial_times.h"

#include <gtest/gtest.h>

namespace mbridge::cuda {
namespace {

constexpr float kMargin = 0.02f;

TEST(TrialTimes, MedianIgnoresAnOutlier) {
  EXPECT_EQ(MedianOf({3, 1, 50, 2, 2}), 2);
  EXPECT_EQ(MedianOf({}), INFINITY);
}

TEST(TrialTimes, TheFirstStaysUnlessBeatenByTheMargin) {
  EXPECT_EQ(PickFastest({{1.0f, 1.0f, 1.0f, 1.0f}, {0.99f, 0.99f, 0.99f, 0.99f}}, kMargin), 0);
  EXPECT_EQ(PickFastest({{1.0f, 1.0f, 1.0f, 1.0f}, {0.97f, 0.97f, 0.97f, 0.97f}}, kMargin), 1);
  EXPECT_EQ(PickFastest({{1.0f, 1.0f}, {0.97f, 0.97f}, {0.9f, 0.9f}, {0.95f, 0.95f}}, kMargin), 2);
}

TEST(TrialTimes, ADriftMeetsAll) {
  // Clocks fall from round to round: the second is slower in each.
  EXPECT_EQ(PickFastest({{1.0f, 1.1f, 1.2f, 1.3f}, {1.02f, 1.12f, 1.22f, 1.32f}}, kMargin), 0);
}

TEST(TrialTimes, AMedianWithoutTheRoundsIsNotEnough) {
  EXPECT_EQ(PickFastest({{1.0f, 1.0f, 1.0f, 1.0f, 1.0f}, {0.9f, 0.9f, 0.9f, 1.4f, 1.4f}}, kMargin), 0);
}

TEST(TrialTimes, WhatRefusesIsNotTaken) {
  EXPECT_EQ(PickFastest({{1.0f, 1.0f}, {INFINITY, INFINITY}}, kMargin), 0);
  EXPECT_EQ(PickFastest({{INFINITY, INFINITY}, {2.0f, 2.0f}}, kMargin), 1);
}

}  // namespace
}  // namespace mbridge::cuda
