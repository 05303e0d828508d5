#include "engine/ops/scale_columns.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

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

}  // namespace
}  // namespace mbridge
