#include "engine/ops/squared_relu.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kWidth = 19;

Values Reference(const Values& x, const Values& bias, DType sum_precision) {
  Values y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double u = bias.empty() ? x[i] : test::RoundTo(sum_precision, x[i] + bias[i % kWidth]);
    y[i] = u > 0 ? u * u : 0;
  }
  return y;
}

TEST(SquaredReluTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (bool with_bias : {false, true}) {
      const Values x = test::RandomValues(kRows * kWidth, 1, 3.0, kind.precision),
                   dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision),
                   bias = with_bias ? test::RandomValues(kWidth, 2, 1.0, kind.precision) : Values();
      const Owned x_data(kind.storage, {kRows, kWidth}, x), bias_data(kind.storage, {kWidth}, with_bias ? bias : Values(kWidth));
      const Owned y(kind.storage, {kRows, kWidth}), dx(kind.storage, {kRows, kWidth}, dy);
      const Tensor added = with_bias ? bias_data.tensor() : Tensor();
      SquaredReluForward({}, x_data, added, kind.precision, y);
      test::ExpectNear(y.ToValues(), Reference(x, bias, kind.precision), kind.epsilon(), 0);
      SquaredReluBackward({}, dx, x_data, added, kind.precision, dx);
      const Values slope =
          test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, bias, DType::kF64), dy); });
      // The sum was rounded before.
      test::ExpectNear(dx.ToValues(), slope, kind.epsilon(), (with_bias ? 8 : 0) * kind.epsilon() + 1e-6);
      for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(dx[i], test::RoundTo(kind.precision, dx[i]));
    }
  }
}

TEST(SquaredReluTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      for (const bool with_bias : {false, true}) {
        const Values x = test::RandomValues(rows * n, 1, 3.0, kind.precision),
                     dy = test::RandomValues(rows * n, 3, 1.0, kind.precision),
                     bias = with_bias ? test::RandomValues(n, 2, 1.0, kind.precision) : Values(n);
        const Owned x_data(kind.storage, {rows, n}, x), bias_data(kind.storage, {n}, bias), y(kind.storage, {rows, n}),
            dx(kind.storage, {rows, n}, dy);
        const Tensor added = with_bias ? bias_data.tensor() : Tensor();
        SquaredReluForward({}, x_data, added, kind.precision, y);
        SquaredReluBackward({}, dx, x_data, added, kind.precision, dx);
        Bounds expected_y, expected_dx;
        for (int64_t i = 0; i < rows * n; ++i) {
          const Bounded positive = Max(Stored(Bounded(x[i]) + bias[i % n], kind.precision), 0);
          expected_y.push_back(Stored(positive * positive, kind.precision));
          expected_dx.push_back(Stored(2 * positive * dy[i], kind.precision));
        }
        test::ExpectBounded(with_bias ? "SquaredReluForward, bias" : "SquaredReluForward", kind, y, expected_y);
        test::ExpectBounded(with_bias ? "SquaredReluBackward, bias" : "SquaredReluBackward", kind, dx, expected_dx);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
