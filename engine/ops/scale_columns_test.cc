#include "engine/ops/scale_columns.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Owned;
using test::Values;

TEST(ScaleColumnsTest, EachPartByItsFactor) {
  for (const test::Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(3 * 7, 1, 2.0, kind.precision);
    const ColumnFactors factors{.parts = 3, .widths = {2, 1, 4}, .factors = {0.5f, 3.0f, -1.3f}};
    const Owned data(kind.storage, {3, 7}, x);
    ScaleColumns({}, data, factors, kind.precision, data);
    for (int64_t i = 0; i < 21; ++i) {
      const float factor = factors.factors[i % 7 < 2 ? 0 : i % 7 < 3 ? 1 : 2];
      EXPECT_EQ(data[i], test::RoundTo(kind.precision, static_cast<float>(x[i]) * factor)) << i;
    }
  }
}

TEST(ScaleColumnsTest, PartsAreAllColumns) {
  const Owned x(DType::kF32, {3, 7});
  EXPECT_THROW(ScaleColumns({}, x, {.parts = 1, .widths = {6}, .factors = {1}}, DType::kF32, x), EngineError);
}

TEST(ScaleColumnsTest, NarrowStorageWithinItsBounds) {
  for (const test::Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : {test::AwkwardShape{3, 7}, {5, 33}, {3, 2047}}) {
      const Values x = test::RandomValues(rows * n, 1, 2.0, kind.precision);
      const ColumnFactors factors{.parts = 3, .widths = {2, 1, n - 3}, .factors = {0.5f, 3.0f, -1.3f}};
      const Owned y(kind.storage, {rows, n});
      ScaleColumns({}, Owned(kind.storage, {rows, n}, x), factors, kind.precision, y);
      Bounds expected;
      for (int64_t i = 0; i < rows * n; ++i) {
        const float factor = factors.factors[i % n < 2 ? 0 : i % n < 3 ? 1 : 2];
        expected.push_back(Stored(Bounded(x[i]) * factor, kind.precision));
      }
      test::ExpectBounded("ScaleColumns", kind, y, expected);
    }
  }
}

}  // namespace
}  // namespace mbridge
