#include "engine/ops/gradient_sums.h"

#include "engine/ops/convert.h"
#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

TEST(GradientSumsTest, RoundsBeforeAdding) {
  for (const Kind& kind : test::kKinds) {
    const Values grad = test::RandomValues(77, 1, 1.0, DType::kF32);
    const Owned main(DType::kF32, {77}, Values(77, 0.125));
    AddGradient({}, Owned(kind.storage, {77}, grad), kind.precision, main);
    for (int i = 0; i < 77; ++i) EXPECT_EQ(main[i], static_cast<float>(0.125 + test::RoundTo(kind.precision, grad[i])));
  }
  const Owned main(DType::kF32, {76});
  EXPECT_THROW(AddGradient({}, Owned(DType::kF32, {77}), DType::kF32, main), EngineError);
}

TEST(GradientSumsTest, ColumnSums) {
  constexpr int64_t kRows = 21, kWidth = 130;
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kRows * kWidth, 1, 1.0, kind.precision);
    const Owned main(DType::kF32, {kWidth}, Values(kWidth, 1.0));
    AddColumnSums({}, Owned(kind.storage, {kRows, kWidth}, x), kind.precision, main);
    for (int64_t j = 0; j < kWidth; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < kRows; ++i) sum += x[i * kWidth + j];
      EXPECT_NEAR(main[j] - 1.0, test::RoundTo(kind.precision, sum), kind.precision == DType::kF32 ? 2e-6 : 1e-6);
    }
  }
}

TEST(ConvertTest, RoundsAndChangesStorage) {
  for (const int64_t count : {1, 7, 99, 2050, 4097}) {
    const Values x = test::RandomValues(count, 1, 8.0, DType::kF32);
    for (DType from : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (DType to : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (DType precision : {DType::kF32, DType::kBF16, DType::kF16}) {
          const Owned in(from, {count}, x), out(to, {count});
          Convert({}, in, precision, out);
          Bounds expected;
          for (int64_t i = 0; i < count; ++i) expected.emplace_back(test::RoundTo(to, test::RoundTo(precision, in[i])));
          test::ExpectBounded(std::string("Convert to ") + std::string(NameOf(to)), {from, precision}, out, expected);
        }
      }
    }
  }
}

TEST(ConvertTest, InPlaceAndRefusals) {
  const Values x = test::RandomValues(99, 1, 8.0, DType::kF32);
  const Owned same(DType::kF32, {99}, x);
  Convert({}, same, DType::kBF16, same);
  EXPECT_EQ(same[5], test::RoundTo(DType::kBF16, x[5]));
  EXPECT_THROW(Convert({}, same, DType::kBF16, Owned(DType::kI32, {99})), EngineError);
  EXPECT_THROW(Convert({}, same, DType::kBF16, Owned(DType::kF32, {98})), EngineError);
}

TEST(ConvertTest, SpecialValuesKeepTheirKind) {
  const Owned in(DType::kF32, {3}, {INFINITY, NAN, -0.0}), out(DType::kBF16, {3});
  Convert({}, in, DType::kBF16, out);
  EXPECT_TRUE(std::isinf(out[0]));
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_TRUE(std::signbit(out[2]));
}

TEST(GradientSumsTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] :
         {test::AwkwardShape{1, 1}, {3, 7}, {257, 33}, {129, 127}, {1031, 8}, {67, 264}, {3, 2047}, {35, 2056}, {1, 4097}}) {
      const Values x = test::RandomValues(rows * n, 1, 1.0, kind.precision),
                   before = test::RandomValues(rows * n, 2, 1.0, DType::kF32);
      const Owned x_data(kind.storage, {rows, n}, x), main(DType::kF32, {rows, n}, before), column_main(DType::kF32, {n}, before);
      AddGradient({}, x_data, kind.precision, main);
      AddColumnSums({}, x_data, kind.precision, column_main);
      Bounds expected, expected_columns;
      std::vector<test::Sum> sums(n);
      for (int64_t i = 0; i < rows * n; ++i) {
        expected.push_back(Bounded(before[i]) + x[i]);
        sums[i % n].Add(x[i]);
      }
      for (int64_t j = 0; j < n; ++j) expected_columns.push_back(before[j] + Stored(sums[j].Total(), kind.precision));
      test::ExpectBounded("AddGradient", kind, main, expected);
      test::ExpectBounded("AddColumnSums", kind, column_main, expected_columns);
    }
  }
}

}  // namespace
}  // namespace mbridge
