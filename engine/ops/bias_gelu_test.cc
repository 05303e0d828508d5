#include "engine/ops/bias_gelu.h"

#include "engine/ops/bias_add.h"
#include "engine/ops/cpu/vector_math.h"
#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 9, kWidth = 35;

double Gelu(GeluKind kind, double u) {
  if (kind == GeluKind::kErf || kind == GeluKind::kErfFused) return 0.5 * u * (1 + std::erf(u / std::sqrt(2.0)));
  return 0.5 * u * (1 + std::tanh(0.79788456 * u * (1 + 0.044715 * u * u)));
}

double Sum(GeluKind kind, DType precision, double x, double bias) {
  return kind == GeluKind::kErf || kind == GeluKind::kTanh ? test::RoundTo(precision, x + bias) : x + bias;
}

TEST(VectorMathTest, TanhKeepsItsRelativeAccuracyNearZero) {
  double error = 0;
  for (double x = 1e-6; x < 12.0; x *= 1.003) {
    const auto f = static_cast<float>(x);
    error = std::max(error, std::fabs(cpu::Tanh(f) / std::tanh(static_cast<double>(f)) - 1));
    EXPECT_EQ(cpu::Tanh(-f), -cpu::Tanh(f));
  }
  EXPECT_LT(error, 3e-7);
  EXPECT_EQ(cpu::Tanh(0.0f), 0.0f);
  EXPECT_EQ(cpu::Tanh(1e9f), 1.0f);
  EXPECT_TRUE(std::isnan(cpu::Tanh(NAN)));
}

TEST(VectorMathTest, ExpAndErfAgainstTheStandardLibrary) {
  double exp_error = 0, erf_error = 0;
  for (double x = -87.0; x < 88.0; x += 0.0137)
    exp_error = std::max(exp_error,
                         std::fabs(cpu::Exp(static_cast<float>(x)) / std::exp(static_cast<double>(static_cast<float>(x))) - 1));
  for (double x = -6.0; x < 6.0; x += 0.00137)
    erf_error =
        std::max(erf_error, std::fabs(cpu::Erf(static_cast<float>(x)) - std::erf(static_cast<double>(static_cast<float>(x)))));
  EXPECT_LT(exp_error, 2e-7);
  EXPECT_LT(erf_error, 2e-7);
  EXPECT_LT(cpu::Exp(-1000.0f), 2e-38f);
  EXPECT_TRUE(std::isnan(cpu::Exp(NAN)));
  EXPECT_TRUE(std::isnan(cpu::Erf(NAN)));
}

TEST(BiasGeluTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (GeluKind gelu : {GeluKind::kTanhFused, GeluKind::kTanh, GeluKind::kErf, GeluKind::kErfFused}) {
      const Values x = test::RandomValues(kRows * kWidth, 1, 4.0, kind.precision),
                   bias = test::RandomValues(kWidth, 2, 1.0, kind.precision);
      const Values dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
      const Owned x_data(kind.storage, {kRows, kWidth}, x), bias_data(kind.storage, {kWidth}, bias);
      const Owned y(kind.storage, {kRows, kWidth}), dx(kind.storage, {kRows, kWidth}, dy);
      BiasGeluForward({}, x_data, bias_data, gelu, kind.precision, y);
      BiasGeluBackward({}, dx, x_data, bias_data, gelu, kind.precision, dx);
      Values expected(x.size()), slope(x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const double u = Sum(gelu, kind.precision, x[i], bias[i % kWidth]);
        expected[i] = Gelu(gelu, u);
        slope[i] = (Gelu(gelu, u + 1e-5) - Gelu(gelu, u - 1e-5)) / 2e-5 * dy[i];
      }
      test::ExpectNear(y.ToValues(), expected, kind.epsilon(), 5e-7);
      test::ExpectNear(dx.ToValues(), slope, kind.epsilon(), 2e-6);
      for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
    }
  }
}

TEST(BiasGeluTest, NarrowStorageHasTheSameBits) {
  if (test::g_on_device) GTEST_SKIP() << "SKIPPED: compares bits of the CPU twin with bits of the device";
  const Values x = test::RandomValues(kRows * kWidth, 1, 4.0), bias = test::RandomValues(kWidth, 2);
  Values results[2];
  for (int i = 0; i < 2; ++i) {
    const DType storage = i == 0 ? DType::kF32 : DType::kBF16;
    const Owned y(storage, {kRows, kWidth});
    BiasGeluForward({}, Owned(storage, {kRows, kWidth}, x), Owned(storage, {kWidth}, bias), GeluKind::kTanhFused, DType::kBF16,
                    y);
    results[i] = y.ToValues();
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(BiasGeluTest, WithoutBias) {
  const Values x = test::RandomValues(kRows * kWidth, 1, 4.0);
  const Owned y(DType::kF32, {kRows, kWidth});
  BiasGeluForward({}, Owned(DType::kF32, {kRows, kWidth}, x), {}, GeluKind::kErf, DType::kF32, y);
  Values expected(x.size());
  for (size_t i = 0; i < x.size(); ++i) expected[i] = Gelu(GeluKind::kErf, x[i]);
  test::ExpectNear(y.ToValues(), expected, 1e-6, 5e-7);
}

TEST(BiasAddTest, RoundsTheProductThenTheSum) {
  for (const Kind& kind : test::kKinds) {
    // Values with more digits than the precision keeps, where storage can hold them.
    const Values x = test::RandomValues(kRows * kWidth, 1, 2.0, DType::kF32),
                 bias = test::RandomValues(kWidth, 2, 1.0, kind.precision);
    const Owned y(kind.storage, {kRows, kWidth}, x);
    BiasAdd({}, y, Owned(kind.storage, {kWidth}, bias), kind.precision);
    for (size_t i = 0; i < x.size(); ++i) {
      const double once = test::RoundTo(kind.precision, x[i]);
      EXPECT_EQ(y[i], test::RoundTo(kind.precision, once + bias[i % kWidth])) << i;
    }
  }
}

void CheckNarrow(const Kind& kind, GeluKind gelu, bool with_bias, int64_t rows, int64_t n) {
  const bool tanh = gelu == GeluKind::kTanh || gelu == GeluKind::kTanhFused;
  const bool eager = gelu == GeluKind::kTanh || gelu == GeluKind::kErf;
  const Values x = test::RandomValues(rows * n, 1, 4.0, kind.precision),
               bias = with_bias ? test::RandomValues(n, 2, 1.0, kind.precision) : Values(n),
               dy = test::RandomValues(rows * n, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, n}, x), bias_data(kind.storage, {n}, bias), y(kind.storage, {rows, n}),
      dx(kind.storage, {rows, n}, dy);
  const Tensor added = with_bias ? bias_data.tensor() : Tensor();
  BiasGeluForward({}, x_data, added, gelu, kind.precision, y);
  BiasGeluBackward({}, dx, x_data, added, gelu, kind.precision, dx);
  Bounds expected_y, expected_dx;
  for (int64_t i = 0; i < rows * n; ++i) {
    const Bounded sum = Bounded(x[i]) + bias[i % n], u = eager ? Stored(sum, kind.precision) : sum;
    expected_y.push_back(Stored(test::Gelu(tanh, u), kind.precision));
    expected_dx.push_back(Stored(test::GeluSlope(tanh, u) * dy[i], kind.precision));
  }
  const std::string variant = ", kind " + std::to_string(static_cast<int>(gelu)) + (with_bias ? ", bias" : "");
  test::ExpectBounded("BiasGeluForward" + variant, kind, y, expected_y);
  test::ExpectBounded("BiasGeluBackward" + variant, kind, dx, expected_dx);
}

TEST(BiasGeluTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      for (const GeluKind gelu : {GeluKind::kTanhFused, GeluKind::kTanh, GeluKind::kErf, GeluKind::kErfFused}) {
        for (const bool with_bias : {false, true}) CheckNarrow(kind, gelu, with_bias, rows, n);
      }
    }
  }
}

TEST(BiasAddTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      const Values x = test::RandomValues(rows * n, 1, 2.0, kind.precision), bias = test::RandomValues(n, 2, 1.0, kind.precision);
      const Owned y(kind.storage, {rows, n}, x);
      BiasAdd({}, y, Owned(kind.storage, {n}, bias), kind.precision);
      Bounds expected;
      for (int64_t i = 0; i < rows * n; ++i) expected.push_back(Stored(Bounded(x[i]) + bias[i % n], kind.precision));
      test::ExpectBounded("BiasAdd", kind, y, expected);
    }
  }
}

}  // namespace
}  // namespace mbridge
