#include "engine/ops/grouped_gemm.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::Values;

// Three experts, the second without rows.
constexpr int64_t kIn = 5, kOut = 3, kRows = 4;
constexpr int64_t kOffsets[] = {0, 3, 3, 4};

class GroupedGemmTest : public testing::TestWithParam<test::Kind> {
 protected:
  GroupedGemmTest() {
    for (uint32_t e = 0; e < 3; ++e) {
      weight_values_.push_back(test::RandomValues(kOut * kIn, 10 + e, 1.0, kind_.precision));
      weights_.emplace_back(kind_.storage, Shape{kOut, kIn}, weight_values_.back());
      grads_.emplace_back(DType::kF32, Shape{kOut, kIn}, Values(kOut * kIn, 1.0));
      weight_tensors_.push_back(weights_.back());
      grad_tensors_.push_back(grads_.back());
    }
  }
  static int64_t ExpertOf(int64_t row) { return row < kOffsets[1] ? 0 : 2; }

  const test::Kind kind_ = GetParam();
  std::vector<Values> weight_values_;
  std::vector<Owned> weights_, grads_;
  std::vector<Tensor> weight_tensors_, grad_tensors_;
  const Owned offsets_{DType::kI32, {4}, {0, 3, 3, 4}};
  const Values x_ = test::RandomValues(kRows * kIn, 1, 1.0, kind_.precision),
               dy_ = test::RandomValues(kRows * kOut, 2, 1.0, kind_.precision);
  const Owned x_data_{kind_.storage, {kRows, kIn}, x_}, dy_data_{kind_.storage, {kRows, kOut}, dy_};
};

TEST_P(GroupedGemmTest, EachRowMeetsItsExpert) {
  const Owned y(kind_.storage, {kRows, kOut}), dx(kind_.storage, {kRows, kIn});
  GroupedGemm({}, x_data_, weight_tensors_, offsets_, y);
  GroupedGemmInputGradient({}, dy_data_, weight_tensors_, offsets_, dx);
  Values expected_y(kRows * kOut), expected_dx(kRows * kIn);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t o = 0; o < kOut; ++o) {
      for (int64_t i = 0; i < kIn; ++i) {
        const double w = weight_values_[ExpertOf(r)][o * kIn + i];
        expected_y[r * kOut + o] += w * x_[r * kIn + i];
        expected_dx[r * kIn + i] += w * dy_[r * kOut + o];
      }
    }
  }
  test::ExpectNear(y.ToValues(), expected_y, kind_.epsilon(), 1e-5);
  test::ExpectNear(dx.ToValues(), expected_dx, kind_.epsilon(), 1e-5);
}

TEST_P(GroupedGemmTest, WeightGradientsAreRoundedAndAdded) {
  const Owned scratch(DType::kF32, {kOut * kIn});
  GroupedGemmWeightGradient({}, dy_data_, x_data_, offsets_, kind_.precision, grad_tensors_, scratch);
  for (int64_t e = 0; e < 3; ++e) {
    Values expected(kOut * kIn);
    for (int64_t r = kOffsets[e]; r < kOffsets[e + 1]; ++r) {
      for (int64_t i = 0; i < kOut * kIn; ++i) expected[i] += dy_[r * kOut + i / kIn] * x_[r * kIn + i % kIn];
    }
    for (double& g : expected) g = 1.0 + g;
    test::ExpectNear(grads_[e].ToValues(), expected, kind_.epsilon(), 2 * kind_.epsilon());
  }
  EXPECT_EQ(grads_[1].ToValues(), Values(kOut * kIn, 1.0));
}

TEST_P(GroupedGemmTest, RefusesOtherOffsets) {
  EXPECT_THROW(GroupedGemm({}, x_data_, weight_tensors_, Owned(DType::kI32, {3}), Owned(kind_.storage, {kRows, kOut})),
               EngineError);
}

INSTANTIATE_TEST_SUITE_P(Kinds, GroupedGemmTest, testing::ValuesIn(test::kKinds));

}  // namespace
}  // namespace mbridge
