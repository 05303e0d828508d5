#include "engine/ops/loss_sum.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::Values;

TEST(LossSum, TargetsAreSequenceFirst) {
  const Owned labels(DType::kI32, {2, 3}, Values{10, 11, 12, 20, 21, 22}), mask(DType::kF32, {2, 3}, Values{1, 0, 1, 1, 1, 0});
  const Owned labels_out(DType::kI32, {6}), weight(DType::kF32, {6});
  SetTargets({}, labels, mask, 2.0f, labels_out, weight);
  EXPECT_EQ(labels_out.ToValues(), (Values{10, 20, 11, 21, 12, 22}));
  EXPECT_EQ(weight.ToValues(), (Values{0.5, 0.5, 0, 0.5, 0.5, 0}));
}

TEST(LossSum, AnEmptyMaskGivesNoWeight) {
  const Owned labels(DType::kI32, {1, 2}, Values{1, 2}), mask(DType::kF32, {1, 2}, Values{0, 0});
  const Owned labels_out(DType::kI32, {2}), weight(DType::kF32, {2});
  SetTargets({}, labels, mask, 2.0f, labels_out, weight);
  EXPECT_EQ(weight.ToValues(), (Values{0, 0}));
}

TEST(LossSum, SumsAreAddedRounded) {
  const Owned loss(DType::kF32, {3, 2}, Values{1.1, 2, 3, 4.7, 5, 6}), mask(DType::kF32, {2, 3}, Values{1, 0, 1, 1, 1, 0});
  double totals[2] = {10, 20};
  AddLossSums({}, loss, mask, {totals, DType::kF64, DeviceType::kCpu, {2}});
  EXPECT_EQ(totals[0],
            10 + static_cast<double>(static_cast<float>(static_cast<double>(1.1f) + 5 + 2 + static_cast<double>(4.7f))));
  EXPECT_EQ(totals[1], 24);
}

}  // namespace
}  // namespace mbridge
