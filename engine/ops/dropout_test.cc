#include "engine/ops/dropout.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 11, kWidth = 71;
constexpr double kP = 0.1;

Values RandomMask(uint32_t seed) {
  Values mask = test::RandomValues(kRows * kWidth, seed);
  for (double& m : mask) m = m > -0.6 ? 1 : 0;
  return mask;
}

TEST(DropoutTest, ScalesOfBothKinds) {
  EXPECT_EQ(DropoutScale(DropoutKind::kEager, kP), 1.1111111640930176f);
  EXPECT_EQ(DropoutScale(DropoutKind::kCompiled, kP), 1.1111111640930176f);
  // A float and a double denominator can give neighbouring floats.
  EXPECT_EQ(DropoutScale(DropoutKind::kEager, 0.7), 1.0f / 0.3f);
  EXPECT_EQ(DropoutScale(DropoutKind::kCompiled, 0.7), static_cast<float>(1.0 / (1.0 - 0.7)));
}

TEST(DropoutTest, Eager) {
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision), mask = RandomMask(2);
    const Owned y(kind.storage, {kRows, kWidth});
    Dropout({}, Owned(kind.storage, {kRows, kWidth}, x), Owned(DType::kU8, {kRows, kWidth}, mask), kP, kind.precision, y);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(y[i], test::RoundTo(kind.precision, static_cast<float>(x[i] * mask[i]) * 1.1111111640930176f)) << i;
    }
  }
}

struct BdaCase {
  bool bias, mask;
  DropoutKind kind;
};

constexpr BdaCase kCases[] = {{true, true, DropoutKind::kCompiled},   {true, true, DropoutKind::kEager},
                              {true, false, DropoutKind::kCompiled},  {true, false, DropoutKind::kEager},
                              {false, true, DropoutKind::kCompiled},  {false, true, DropoutKind::kEager},
                              {false, false, DropoutKind::kCompiled}, {false, false, DropoutKind::kEager}};

// In double, rounded where the kind rounds.
double Forward(const BdaCase& c, DType precision, double x, double bias, double residual, double keep) {
  const bool eager = c.kind == DropoutKind::kEager;
  const auto step = [&](double v) { return eager ? test::RoundTo(precision, v) : v; };
  double v = c.bias ? step(x + bias) : x;
  if (c.mask) v = step(v * keep * DropoutScale(c.kind, kP));
  return test::RoundTo(precision, residual + v);
}

TEST(BiasDropoutAddTest, ForwardRoundsWhereItsKindRounds) {
  for (const Kind& kind : test::kKinds) {
    for (const BdaCase& c : kCases) {
      const Values x = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision),
                   bias = test::RandomValues(kWidth, 2, 1.0, kind.precision);
      const Values residual = test::RandomValues(kRows * kWidth, 3, 3.0, kind.precision), mask = RandomMask(4);
      const Owned bias_data(kind.storage, {kWidth}, bias), mask_data(DType::kU8, {kRows, kWidth}, mask);
      const Owned y(kind.storage, {kRows, kWidth}, residual);
      BiasDropoutAddForward({}, Owned(kind.storage, {kRows, kWidth}, x), c.bias ? bias_data.tensor() : Tensor(), y,
                            c.mask ? mask_data.tensor() : Tensor(), kP, c.kind, kind.precision, y);
      Values expected(x.size());
      for (size_t i = 0; i < x.size(); ++i)
        expected[i] = Forward(c, kind.precision, x[i], bias[i % kWidth], residual[i], mask[i]);
      int64_t different = 0;
      for (size_t i = 0; i < x.size(); ++i) different += y[i] != expected[i];
      // F32 arithmetic against double may fall on the other side of a tie now and then.
      if (kind.precision != DType::kF32) {
        EXPECT_LE(different, 2);
      }
      test::ExpectNear(y.ToValues(), expected, 2 * kind.epsilon(), 1e-6);
    }
  }
}

TEST(BiasDropoutAddTest, Backward) {
  for (const Kind& kind : test::kKinds) {
    for (const BdaCase& c : kCases) {
      const Values dy = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision), mask = RandomMask(4);
      const Owned mask_data(DType::kU8, {kRows, kWidth}, mask), dx(kind.storage, {kRows, kWidth});
      const Owned bias_grad(DType::kF32, {kWidth}, Values(kWidth, 3.0));
      BiasDropoutAddBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), c.mask ? mask_data.tensor() : Tensor(), kP, c.kind,
                             kind.precision, dx, c.bias ? bias_grad.tensor() : Tensor());
      Values column(kWidth);
      for (size_t i = 0; i < dy.size(); ++i) {
        const float v = c.mask ? static_cast<float>(dy[i] * mask[i]) * DropoutScale(c.kind, kP) : static_cast<float>(dy[i]);
        const double rounded = test::RoundTo(kind.precision, v);
        EXPECT_EQ(dx[i], rounded) << i;
        column[i % kWidth] += c.kind == DropoutKind::kCompiled ? v : rounded;
      }
      for (int64_t j = 0; j < kWidth; ++j) {
        const double expected = 3.0 + (c.bias ? test::RoundTo(kind.precision, column[j]) : 0.0);
        EXPECT_NEAR(bias_grad[j], expected, kind.precision == DType::kF32 ? 5e-6 : kind.epsilon() * std::fabs(column[j]) * 2);
      }
    }
  }
}

Values NarrowMask(int64_t count) {
  Values mask = test::RandomValues(count, 2);
  for (double& m : mask) m = m > -0.6 ? 1 : 0;
  return mask;
}

TEST(DropoutTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      const Values x = test::RandomValues(rows * n, 1, 2.0, kind.precision), mask = NarrowMask(rows * n);
      const Owned y(kind.storage, {rows, n}, x);
      Dropout({}, y, Owned(DType::kU8, {rows, n}, mask), kP, kind.precision, y);
      Bounds expected;
      for (int64_t i = 0; i < rows * n; ++i)
        expected.push_back(Stored(Bounded(x[i]) * mask[i] * DropoutScale(DropoutKind::kEager, kP), kind.precision));
      test::ExpectBounded("Dropout", kind, y, expected);
    }
  }
}

void CheckNarrow(const Kind& kind, const BdaCase& c, int64_t rows, int64_t n) {
  const bool eager = c.kind == DropoutKind::kEager;
  const Values x = test::RandomValues(rows * n, 1, 2.0, kind.precision), bias = test::RandomValues(n, 2, 1.0, kind.precision),
               residual = test::RandomValues(rows * n, 3, 3.0, kind.precision), mask = NarrowMask(rows * n),
               before = test::RandomValues(n, 5, 1.0, DType::kF32);
  const Owned x_data(kind.storage, {rows, n}, x), bias_data(kind.storage, {n}, bias), mask_data(DType::kU8, {rows, n}, mask);
  const Owned y(kind.storage, {rows, n}, residual), dx(kind.storage, {rows, n}), bias_grad(DType::kF32, {n}, before);
  const Tensor keep = c.mask ? mask_data.tensor() : Tensor();
  BiasDropoutAddForward({}, x_data, c.bias ? bias_data.tensor() : Tensor(), y, keep, kP, c.kind, kind.precision, y);
  BiasDropoutAddBackward({}, x_data, keep, kP, c.kind, kind.precision, dx, c.bias ? bias_grad.tensor() : Tensor());
  const auto step = [&](const Bounded& v) { return eager ? Stored(v, kind.precision) : v; };
  const auto dropped = [&](const Bounded& v, int64_t i) { return c.mask ? step(v * mask[i] * DropoutScale(c.kind, kP)) : v; };
  Bounds expected_y, expected_dx, expected_grad;
  std::vector<test::Sum> sums(n);
  for (int64_t i = 0; i < rows * n; ++i) {
    const Bounded sum = c.bias ? step(Bounded(x[i]) + bias[i % n]) : x[i];
    expected_y.push_back(Stored(residual[i] + dropped(sum, i), kind.precision));
    const Bounded gradient = dropped(x[i], i);
    expected_dx.push_back(Stored(gradient, kind.precision));
    sums[i % n].Add(gradient);
  }
  for (int64_t j = 0; j < n; ++j)
    expected_grad.push_back(c.bias ? before[j] + Stored(sums[j].Total(), kind.precision) : before[j]);
  const std::string variant = std::string(eager ? ", eager" : ", compiled") + (c.bias ? ", bias" : "") + (c.mask ? ", mask" : "");
  test::ExpectBounded("BiasDropoutAddForward" + variant, kind, y, expected_y);
  test::ExpectBounded("BiasDropoutAddBackward" + variant, kind, dx, expected_dx);
  test::ExpectBounded("BiasDropoutAddBackward's bias_grad" + variant, kind, bias_grad, expected_grad);
}

TEST(BiasDropoutAddTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      for (const BdaCase& c : kCases) CheckNarrow(kind, c, rows, n);
    }
  }
}

}  // namespace
}  // namespace mbridge
