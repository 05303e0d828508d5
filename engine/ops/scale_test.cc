#include "engine/ops/scale.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

TEST(ScaleTest, MultipliesWithOneRoundingAlsoInPlace) {
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(37, 1, 2.0, kind.precision);
    const Owned in(kind.storage, {37}, x), out(kind.storage, {37});
    Scale({}, in, 0.22f, kind.precision, out);
    Scale({}, in, 0.22f, kind.precision, in);
    for (int64_t i = 0; i < 37; ++i) EXPECT_EQ(out[i], test::RoundTo(kind.precision, static_cast<float>(x[i]) * 0.22f));
    EXPECT_EQ(in.ToValues(), out.ToValues());
  }
}

TEST(ScaleTest, RefusesSizesThatDiffer) {
  const Owned x(DType::kF32, {4}), y(DType::kF32, {5});
  EXPECT_THROW(Scale({}, x, 2.0f, DType::kF32, y), EngineError);
}

TEST(ScaleTest, NarrowStorageWithinItsBounds) {
  constexpr float kFactor = 0.22f;
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      const Values x = test::RandomValues(rows * n, 1, 2.0, kind.precision);
      const Owned y(kind.storage, {rows, n});
      Scale({}, Owned(kind.storage, {rows, n}, x), kFactor, kind.precision, y);
      Bounds expected;
      for (const double v : x) expected.push_back(Stored(Bounded(v) * kFactor, kind.precision));
      test::ExpectBounded("Scale", kind, y, expected);
    }
  }
}

}  // namespace
}  // namespace mbridge
