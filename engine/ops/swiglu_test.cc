#include "engine/ops/swiglu.h"

#include <algorithm>
#include <utility>

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 7, kWidth = 19;  // Of y.

double Silu(double u) { return u / (1 + std::exp(-u)); }

struct Inputs {
  double gate, linear;
};

// Of element i of y [rows, width]: x + bias, rounded if it is told.
Inputs InputsOf(const Values& x, const Values& bias, DType sum_precision, int64_t i, int64_t width) {
  const int64_t row = i / width, j = i % width;
  const double gate = x[row * 2 * width + j], linear = x[row * 2 * width + width + j];
  if (bias.empty()) return {gate, linear};
  return {test::RoundTo(sum_precision, gate + bias[j]), test::RoundTo(sum_precision, linear + bias[width + j])};
}

// Without roundings, except that of the sum if it is told.
Values Reference(const Values& x, const Values& bias, DType sum_precision, int64_t width = kWidth) {
  Values y(x.size() / 2);
  for (size_t i = 0; i < y.size(); ++i) {
    const auto [gate, linear] = InputsOf(x, bias, sum_precision, static_cast<int64_t>(i), width);
    y[i] = Silu(gate) * linear;
  }
  return y;
}

Values GradientReference(const Values& dy, const Values& x, const Values& bias, DType sum_precision, int64_t width) {
  Values dx(x.size());
  for (int64_t i = 0; i < static_cast<int64_t>(dy.size()); ++i) {
    const auto [gate, linear] = InputsOf(x, bias, sum_precision, i, width);
    const double s = 1 / (1 + std::exp(-gate));
    const int64_t at = i / width * 2 * width + i % width;
    dx[at] = dy[i] * linear * s * (1 + gate * (1 - s));
    dx[at + width] = dy[i] * Silu(gate);
  }
  return dx;
}

TEST(SwiGluTest, ForwardWithBias) {
  for (const Kind& kind : test::kKinds) {
    for (SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
      const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0, kind.precision),
                   bias = test::RandomValues(2 * kWidth, 2, 1.0, kind.precision);
      const Owned y(kind.storage, {kRows, kWidth});
      SwiGluForward({}, Owned(kind.storage, {kRows, 2 * kWidth}, x), Owned(kind.storage, {2 * kWidth}, bias), glu, kind.precision,
                    y);
      const DType sum = glu == SwiGluKind::kEager ? kind.precision : DType::kF64;
      test::ExpectNear(y.ToValues(), Reference(x, bias, sum), (glu == SwiGluKind::kEager ? 2 : 1) * kind.epsilon(), 2e-6);
      for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
    }
  }
}

TEST(SwiGluTest, BackwardAgainstFiniteDifferences) {
  for (const Kind& kind : test::kKinds) {
    for (SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
      for (bool with_bias : {false, true}) {
        const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0, kind.precision);
        const Values bias = with_bias ? test::RandomValues(2 * kWidth, 2, 1.0, kind.precision) : Values();
        const Values dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
        const Owned bias_data(kind.storage, {2 * kWidth}, with_bias ? bias : Values(2 * kWidth)),
            dx(kind.storage, {kRows, 2 * kWidth});
        SwiGluBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), Owned(kind.storage, {kRows, 2 * kWidth}, x),
                       with_bias ? bias_data.tensor() : Tensor(), glu, kind.precision, dx);
        const Values slope =
            test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, bias, DType::kF64), dy); });
        // The eager kind rounds sum, silu and product before.
        const double steps = glu == SwiGluKind::kEager ? 3 : 1;
        const double absolute = glu == SwiGluKind::kEager && with_bias ? 8 * kind.epsilon() : 3e-6;
        test::ExpectNear(dx.ToValues(), slope, steps * kind.epsilon(), absolute);
      }
    }
  }
}

double LargestMagnitude(const Values& x, double largest) {
  for (const double value : x) largest = std::max(largest, std::fabs(value));
  return largest;
}

// The largest value is that of the result as it is stored, to the bit.
void CheckWithAmax(const Kind& kind, SwiGluKind glu, bool with_bias, int64_t rows, int64_t width) {
  SCOPED_TRACE(testing::Message() << rows << " x " << width << ' ' << NameOf(kind.storage) << ' ' << NameOf(kind.precision));
  const Values x = test::RandomValues(rows * 2 * width, 1, 4.0, kind.precision),
               bias = with_bias ? test::RandomValues(2 * width, 2, 1.0, kind.precision) : Values(),
               dy = test::RandomValues(rows * width, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, 2 * width}, x), dy_data(kind.storage, {rows, width}, dy),
      bias_data(kind.storage, {2 * width}, with_bias ? bias : Values(2 * width)), y(kind.storage, {rows, width}),
      dx(kind.storage, {rows, 2 * width});
  const Tensor added = with_bias ? bias_data.tensor() : Tensor();
  const bool eager = glu == SwiGluKind::kEager;
  const DType sum = eager ? kind.precision : DType::kF64;
  // The end is rounded, and the eager kind's gate or product before it; silu and its slope have an F32 error of their own, which
  // is not relative where terms cancel.
  const double relative = (eager ? 2 : 1) * kind.epsilon(), absolute = 3e-6;
  for (const double before : {0.0, 0.25, 1000.0}) {
    const Owned amax(DType::kF32, {1}, {before}), dx_amax(DType::kF32, {1}, {before});
    SwiGluForwardWithAmax({}, x_data, added, glu, kind.precision, y, amax);
    test::ExpectNear(y.ToValues(), Reference(x, bias, sum, width), relative, absolute);
    EXPECT_EQ(amax[0], LargestMagnitude(y.ToValues(), before));
    SwiGluBackwardWithAmax({}, dy_data, x_data, added, glu, kind.precision, dx, dx_amax);
    test::ExpectNear(dx.ToValues(), GradientReference(dy, x, bias, sum, width), relative, absolute);
    EXPECT_EQ(dx_amax[0], LargestMagnitude(dx.ToValues(), before));
  }
}

TEST(SwiGluTest, WithAmaxMatchesADoubleReference) {
  for (const Kind& kind : test::kKinds) {
    for (const SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
      for (const bool with_bias : {false, true}) {
        for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{0, 16}, {1, 1}, {1, 8}, {7, 19}, {3, 264}, {65, 33}}) {
          CheckWithAmax(kind, glu, with_bias, rows, width);
        }
      }
    }
  }
}

TEST(SwiGluTest, AmaxPassesOverNan) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0), dy = test::RandomValues(kRows * kWidth, 3);
    x[5] = x[2 * kWidth + kWidth + 3] = dy[4 * kWidth] = NAN;
    const Owned x_data(dtype, {kRows, 2 * kWidth}, x), dy_data(dtype, {kRows, kWidth}, dy), y(dtype, {kRows, kWidth}),
        dx(dtype, {kRows, 2 * kWidth}), amax(DType::kF32, {1}), dx_amax(DType::kF32, {1});
    SwiGluForwardWithAmax({}, x_data, {}, SwiGluKind::kFused, dtype, y, amax);
    SwiGluBackwardWithAmax({}, dy_data, x_data, {}, SwiGluKind::kFused, dtype, dx, dx_amax);
    EXPECT_TRUE(std::isnan(y[5]) && std::isnan(y[kWidth + 3]) && std::isnan(dx[5]));
    EXPECT_EQ(amax[0], LargestMagnitude(y.ToValues(), 0));  // std::max leaves its first argument beside NaN.
    EXPECT_EQ(dx_amax[0], LargestMagnitude(dx.ToValues(), 0));
    EXPECT_GT(amax[0], 0.0);
    EXPECT_GT(dx_amax[0], 0.0);
  }
}

TEST(SwiGluTest, NarrowStorageHasTheSameBits) {
  if (test::g_on_device) GTEST_SKIP() << "SKIPPED: compares bits of the CPU twin with bits of the device";
  const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0);
  for (SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
    Values results[2];
    for (int i = 0; i < 2; ++i) {
      const DType storage = i == 0 ? DType::kF32 : DType::kBF16;
      const Owned y(storage, {kRows, kWidth});
      SwiGluForward({}, Owned(storage, {kRows, 2 * kWidth}, x), {}, glu, DType::kBF16, y);
      results[i] = y.ToValues();
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST(SwiGluTest, RefusesWidthsThatDoNotFit) {
  const Owned x(DType::kF32, {kRows, kWidth}), y(DType::kF32, {kRows, kWidth});
  EXPECT_THROW(SwiGluForward({}, x, {}, SwiGluKind::kFused, DType::kF32, y), EngineError);
}

// Forward, backward and the largest values where both are asked for.
void CheckNarrow(const Kind& kind, SwiGluKind glu, bool with_bias, int64_t rows, int64_t n) {
  const bool eager = glu == SwiGluKind::kEager;
  const Values x = test::RandomValues(rows * 2 * n, 1, 4.0, kind.precision),
               bias = with_bias ? test::RandomValues(2 * n, 2, 1.0, kind.precision) : Values(2 * n),
               dy = test::RandomValues(rows * n, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, 2 * n}, x), dy_data(kind.storage, {rows, n}, dy),
      bias_data(kind.storage, {2 * n}, bias), y(kind.storage, {rows, n}), dx(kind.storage, {rows, 2 * n});
  const Tensor added = with_bias ? bias_data.tensor() : Tensor();
  SwiGluForward({}, x_data, added, glu, kind.precision, y);
  SwiGluBackward({}, dy_data, x_data, added, glu, kind.precision, dx);
  const auto step = [&](const Bounded& v) { return eager ? Stored(v, kind.precision) : v; };
  Bounds expected_y(rows * n), expected_dx(rows * 2 * n);
  for (int64_t i = 0; i < rows * n; ++i) {
    const int64_t j = i % n, at = i / n * 2 * n + j;
    const Bounded gate = step(Bounded(x[at]) + bias[j]), linear = step(Bounded(x[at + n]) + bias[j + n]), s = Sigmoid(gate);
    expected_y[i] = Stored(step(gate * s) * linear, kind.precision);
    expected_dx[at] = Stored(step(dy[i] * linear) * (s * (1 + gate * (1 - s))), kind.precision);
    expected_dx[at + n] = Stored(dy[i] * step(gate * s), kind.precision);
  }
  const std::string variant = std::string(eager ? ", eager" : ", fused") + (with_bias ? ", bias" : "");
  test::ExpectBounded("SwiGluForward" + variant, kind, y, expected_y);
  test::ExpectBounded("SwiGluBackward" + variant, kind, dx, expected_dx);
  const Owned amax(DType::kF32, {1}), dx_amax(DType::kF32, {1});
  SwiGluForwardWithAmax({}, x_data, added, glu, kind.precision, y, amax);
  SwiGluBackwardWithAmax({}, dy_data, x_data, added, glu, kind.precision, dx, dx_amax);
  test::ExpectBounded("SwiGluForwardWithAmax" + variant, kind, y, expected_y);
  test::ExpectBounded("SwiGluBackwardWithAmax" + variant, kind, dx, expected_dx);
  EXPECT_EQ(amax[0], LargestMagnitude(y.ToValues(), 0)) << variant << " " << rows << " " << n;
  EXPECT_EQ(dx_amax[0], LargestMagnitude(dx.ToValues(), 0)) << variant << " " << rows << " " << n;
}

TEST(SwiGluTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      for (const SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
        for (const bool with_bias : {false, true}) CheckNarrow(kind, glu, with_bias, rows, n);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
