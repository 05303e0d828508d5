#include "engine/ops/geglu.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kWidth = 19;  // Of y.

bool IsTanh(GeluKind kind) { return kind == GeluKind::kTanh || kind == GeluKind::kTanhFused; }
bool IsFused(GeluKind kind) { return kind == GeluKind::kTanhFused || kind == GeluKind::kErfFused; }

double Gelu(GeluKind kind, double u) {
  if (IsTanh(kind)) return 0.5 * u * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
  return 0.5 * u * (1 + std::erf(u / std::sqrt(2.0)));
}

// Without roundings, except that of the sum if it is told.
Values Reference(const Values& x, const Values& bias, GeluKind kind, DType sum_precision) {
  Values y(kRows * kWidth);
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    const int64_t row = i / kWidth, j = i % kWidth;
    double gate = x[row * 2 * kWidth + j], linear = x[row * 2 * kWidth + kWidth + j];
    if (!bias.empty()) {
      gate = test::RoundTo(sum_precision, gate + bias[j]);
      linear = test::RoundTo(sum_precision, linear + bias[kWidth + j]);
    }
    y[i] = Gelu(kind, gate) * linear;
  }
  return y;
}

void Check(const Kind& kind, GeluKind gelu, bool with_bias) {
  const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0, kind.precision),
               bias = with_bias ? test::RandomValues(2 * kWidth, 2, 1.0, kind.precision) : Values(),
               dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {kRows, 2 * kWidth}, x), y(kind.storage, {kRows, kWidth}),
      dx(kind.storage, {kRows, 2 * kWidth}), bias_data(kind.storage, {2 * kWidth}, with_bias ? bias : Values(2 * kWidth));
  const Tensor added = with_bias ? bias_data.tensor() : Tensor();
  GegluForward({}, x_data, added, gelu, kind.precision, y);
  const DType sum = IsFused(gelu) ? DType::kF64 : kind.precision;
  test::ExpectNear(y.ToValues(), Reference(x, bias, gelu, sum), (IsFused(gelu) ? 1 : 2) * kind.epsilon(), 2e-6);
  for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));

  GegluBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), x_data, added, gelu, kind.precision, dx);
  const Values slope =
      test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, bias, gelu, DType::kF64), dy); });
  // The eager kinds round sum, gate and product before.
  const double absolute = !IsFused(gelu) && with_bias ? 8 * kind.epsilon() : 3e-6;
  test::ExpectNear(dx.ToValues(), slope, (IsFused(gelu) ? 1 : 3) * kind.epsilon(), absolute);
}

TEST(GegluTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (GeluKind gelu : {GeluKind::kTanhFused, GeluKind::kTanh, GeluKind::kErf, GeluKind::kErfFused}) {
      for (bool with_bias : {false, true}) Check(kind, gelu, with_bias);
    }
  }
}

TEST(GegluTest, RefusesWidthsThatDoNotFit) {
  const Owned x(DType::kF32, {kRows, kWidth}), y(DType::kF32, {kRows, kWidth});
  EXPECT_THROW(GegluForward({}, x, {}, GeluKind::kTanh, DType::kF32, y), EngineError);
}

void CheckNarrow(const Kind& kind, GeluKind gelu, bool with_bias, int64_t rows, int64_t n) {
  const Values x = test::RandomValues(rows * 2 * n, 1, 4.0, kind.precision),
               bias = with_bias ? test::RandomValues(2 * n, 2, 1.0, kind.precision) : Values(2 * n),
               dy = test::RandomValues(rows * n, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, 2 * n}, x), bias_data(kind.storage, {2 * n}, bias), y(kind.storage, {rows, n}),
      dx(kind.storage, {rows, 2 * n});
  const Tensor added = with_bias ? bias_data.tensor() : Tensor();
  GegluForward({}, x_data, added, gelu, kind.precision, y);
  GegluBackward({}, Owned(kind.storage, {rows, n}, dy), x_data, added, gelu, kind.precision, dx);
  const auto step = [&](const Bounded& v) { return IsFused(gelu) ? v : Stored(v, kind.precision); };
  Bounds expected_y(rows * n), expected_dx(rows * 2 * n);
  for (int64_t i = 0; i < rows * n; ++i) {
    const int64_t j = i % n, at = i / n * 2 * n + j;
    const Bounded gate = step(Bounded(x[at]) + bias[j]), linear = step(Bounded(x[at + n]) + bias[j + n]);
    const Bounded value = step(test::Gelu(IsTanh(gelu), gate));
    expected_y[i] = Stored(value * linear, kind.precision);
    expected_dx[at] = Stored(step(dy[i] * linear) * test::GeluSlope(IsTanh(gelu), gate), kind.precision);
    expected_dx[at + n] = Stored(dy[i] * value, kind.precision);
  }
  const std::string variant = ", kind " + std::to_string(static_cast<int>(gelu)) + (with_bias ? ", bias" : "");
  test::ExpectBounded("GegluForward" + variant, kind, y, expected_y);
  test::ExpectBounded("GegluBackward" + variant, kind, dx, expected_dx);
}

TEST(GegluTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      for (const GeluKind gelu : {GeluKind::kTanhFused, GeluKind::kTanh, GeluKind::kErf, GeluKind::kErfFused}) {
        for (const bool with_bias : {false, true}) CheckNarrow(kind, gelu, with_bias, rows, n);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
