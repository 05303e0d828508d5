#include "engine/ops/grouped_gemm.h"

#include <utility>

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
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

// Four experts, the second without rows.
void CheckNarrow(DType dtype, int64_t in, int64_t out) {
  const test::Kind kind{dtype, dtype};
  constexpr int64_t offsets[] = {0, 67, 67, 68, 101}, rows = 101, experts = 4;
  const Values x = test::RandomValues(rows * in, 1, 1.0, dtype), dy = test::RandomValues(rows * out, 2, 1.0, dtype),
               w = test::RandomValues(experts * out * in, 3, 1.0, dtype),
               before = test::RandomValues(experts * out * in, 4, 1.0, DType::kF32);
  const Owned x_data(dtype, {rows, in}, x), dy_data(dtype, {rows, out}, dy), weights(dtype, {experts, out * in}, w),
      grads(DType::kF32, {experts, out * in}, before), y(dtype, {rows, out}), dx(dtype, {rows, in}),
      scratch(DType::kF32, {out * in}), places(DType::kI32, {experts + 1}, {0, 67, 67, 68, 101});
  std::vector<Tensor> weight_tensors, grad_tensors;
  for (int64_t e = 0; e < experts; ++e) {
    for (const auto& [from, to] : {std::pair{&weights, &weight_tensors}, std::pair{&grads, &grad_tensors}}) {
      to->push_back(from->tensor().Rows(e, 1));
      to->back().shape = {out, in};
    }
  }
  GroupedGemm({}, x_data, weight_tensors, places, y);
  GroupedGemmInputGradient({}, dy_data, weight_tensors, places, dx);
  GroupedGemmWeightGradient({}, dy_data, x_data, places, dtype, grad_tensors, scratch);
  std::vector<test::Sum> y_sums(rows * out), dx_sums(rows * in), w_sums(experts * out * in);
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (int64_t i = 0; i < out * in; ++i) {
        const int64_t at = e * out * in + i, to = r * out + i / in, from = r * in + i % in;
        y_sums[to].Add(Bounded(w[at]) * x[from]);
        dx_sums[from].Add(Bounded(w[at]) * dy[to]);
        w_sums[at].Add(Bounded(dy[to]) * x[from]);
      }
    }
  }
  const auto stored = [&](const std::vector<test::Sum>& sums) {
    Bounds bounds;
    for (const test::Sum& sum : sums) bounds.push_back(Stored(sum.Total(test::kTensorCoreUnit), dtype));
    return bounds;
  };
  Bounds expected_grads = stored(w_sums);
  for (size_t i = 0; i < before.size(); ++i) expected_grads[i] = before[i] + expected_grads[i];
  const std::string variant = " of " + std::to_string(in) + " into " + std::to_string(out);
  test::ExpectBounded("GroupedGemm" + variant, kind, y, stored(y_sums));
  test::ExpectBounded("GroupedGemmInputGradient" + variant, kind, dx, stored(dx_sums));
  test::ExpectBounded("GroupedGemmWeightGradient" + variant, kind, grads, expected_grads);
}

TEST(NarrowGroupedGemmTest, NarrowStorageWithinItsBounds) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {33, 127}, {64, 72}, {264, 40}})
      CheckNarrow(dtype, in, out);
  }
}

}  // namespace
}  // namespace mbridge
