#include "engine/ops/layer_norm.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kWidth = 37;
constexpr float kEpsilon = 1e-5f;

NormOptions OptionsOf(const Kind& kind, float gamma_offset = 0.0f) { return {kEpsilon, gamma_offset, kind.precision}; }

Values Reference(const Values& x, const Values& gamma, const Values& beta, double gamma_offset = 0) {
  Values y(x.size());
  for (int64_t i = 0; i < kRows; ++i) {
    double mean = 0, variance = 0;
    for (int64_t j = 0; j < kWidth; ++j) mean += x[i * kWidth + j] / kWidth;
    for (int64_t j = 0; j < kWidth; ++j) variance += std::pow(x[i * kWidth + j] - mean, 2) / kWidth;
    for (int64_t j = 0; j < kWidth; ++j) {
      y[i * kWidth + j] = (x[i * kWidth + j] - mean) / std::sqrt(variance + kEpsilon) * (gamma[j] + gamma_offset) + beta[j];
    }
  }
  return y;
}

struct Inputs {
  Values x, gamma, beta, dy, residual;
};

Inputs MakeInputs(DType precision) {
  return {test::RandomValues(kRows * kWidth, 1, 2.0, precision), test::RandomValues(kWidth, 2, 1.5, precision),
          test::RandomValues(kWidth, 3, 1.0, precision), test::RandomValues(kRows * kWidth, 4, 1.0, precision),
          test::RandomValues(kRows * kWidth, 5, 1.0, precision)};
}

TEST(LayerNormTest, Forward) {
  for (const Kind& kind : test::kKinds) {
    const NormOptions options = OptionsOf(kind);
    const Inputs in = MakeInputs(kind.precision);
    const Owned x(kind.storage, {kRows, kWidth}, in.x), gamma(kind.storage, {kWidth}, in.gamma),
        beta(kind.storage, {kWidth}, in.beta);
    const Owned y(kind.storage, {kRows, kWidth}), mean(DType::kF32, {kRows}), rstd(DType::kF32, {kRows});
    LayerNormForward({}, x, gamma, beta, options, y, mean, rstd);
    test::ExpectNear(y.ToValues(), Reference(in.x, in.gamma, in.beta), kind.epsilon(), 1e-6);
    for (int64_t i = 0; i < y.tensor().size(); ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
  }
}

void CheckBackward(const Kind& kind, float offset) {
  const NormOptions options = OptionsOf(kind, offset);
  const Inputs in = MakeInputs(kind.precision);
  const Owned x(kind.storage, {kRows, kWidth}, in.x), gamma(kind.storage, {kWidth}, in.gamma),
      beta(kind.storage, {kWidth}, in.beta);
  const Owned dy(kind.storage, {kRows, kWidth}, in.dy), y(kind.storage, {kRows, kWidth}), dx(kind.storage, {kRows, kWidth});
  const Owned mean(DType::kF32, {kRows}), rstd(DType::kF32, {kRows});
  const Owned gamma_grad(DType::kF32, {kWidth}, Values(kWidth, 1.0)), beta_grad(DType::kF32, {kWidth}, Values(kWidth, 2.0));
  LayerNormForward({}, x, gamma, beta, options, y, mean, rstd);
  LayerNormBackward({}, dy, x, gamma, mean, rstd, {}, options, dx, gamma_grad, beta_grad);
  test::ExpectNear(y.ToValues(), Reference(in.x, in.gamma, in.beta, offset), kind.epsilon(), 1e-6);
  const auto loss = [&](const Values& a, const Values& g, const Values& b) {
    return test::Dot(Reference(a, g, b, offset), in.dy);
  };
  const double tolerance = kind.epsilon();
  test::ExpectNear(dx.ToValues(), test::NumericGradient(in.x, [&](const Values& v) { return loss(v, in.gamma, in.beta); }),
                   tolerance, 2e-6);
  Values expected_gamma = test::NumericGradient(in.gamma, [&](const Values& v) { return loss(in.x, v, in.beta); });
  Values expected_beta = test::NumericGradient(in.beta, [&](const Values& v) { return loss(in.x, in.gamma, v); });
  for (double& v : expected_gamma) v = test::RoundTo(kind.precision, v) + 1.0;  // Rounded, then added to what was there.
  for (double& v : expected_beta) v = test::RoundTo(kind.precision, v) + 2.0;
  test::ExpectNear(gamma_grad.ToValues(), expected_gamma, tolerance, 2 * tolerance);
  test::ExpectNear(beta_grad.ToValues(), expected_beta, tolerance, 2 * tolerance);
}

TEST(LayerNormTest, BackwardAgainstFiniteDifferences) {
  for (const Kind& kind : test::kKinds) {
    for (float offset : {0.0f, 1.0f}) CheckBackward(kind, offset);
  }
}

TEST(LayerNormTest, BackwardJoinsTheResidualGradientWithASecondRounding) {
  for (const Kind& kind : test::kKinds) {
    const Inputs in = MakeInputs(kind.precision);
    const Owned x(kind.storage, {kRows, kWidth}, in.x), gamma(kind.storage, {kWidth}, in.gamma),
        beta(kind.storage, {kWidth}, in.beta);
    const Owned dy(kind.storage, {kRows, kWidth}, in.dy), y(kind.storage, {kRows, kWidth}), alone(kind.storage, {kRows, kWidth});
    const NormOptions options = OptionsOf(kind);
    const Owned joined(kind.storage, {kRows, kWidth}, in.residual), mean(DType::kF32, {kRows}), rstd(DType::kF32, {kRows});
    const Owned gamma_grad(DType::kF32, {kWidth}), beta_grad(DType::kF32, {kWidth});
    LayerNormForward({}, x, gamma, beta, options, y, mean, rstd);
    LayerNormBackward({}, dy, x, gamma, mean, rstd, {}, options, alone, gamma_grad, beta_grad);
    LayerNormBackward({}, dy, x, gamma, mean, rstd, joined, options, joined, gamma_grad, beta_grad);
    for (int64_t i = 0; i < kRows * kWidth; ++i)
      EXPECT_EQ(joined[i], test::RoundTo(kind.precision, in.residual[i] + alone[i])) << i;
  }
}

// What every kernel for another width, vectors or not, must give for 16-bit storage.
constexpr test::AwkwardShape kNarrowShapes[] = {{1, 1},    {3, 7},    {5, 33},   {3, 127},  {9, 96},
                                                {2, 264},  {3, 520},  {5, 776},  {3, 1032}, {3, 2047},
                                                {1, 2050}, {2, 2056}, {2, 4097}, {3, 4104}, {1, 8200}};

struct RowSums {
  Bounded mean, rstd;
};

RowSums SumsOf(const double* x, int64_t width) {
  test::Sum sum, squares;
  for (int64_t j = 0; j < width; ++j) sum.Add(x[j]);
  const Bounded mean = sum.Total() / static_cast<double>(width);
  for (int64_t j = 0; j < width; ++j) squares.Add((x[j] - mean) * (x[j] - mean));
  return {mean, 1 / Sqrt(squares.Total() / static_cast<double>(width) + kEpsilon)};
}

void CheckNarrow(const Kind& kind, int64_t rows, int64_t width, bool has_residual) {
  const double offset = 1;
  const NormOptions options = OptionsOf(kind, static_cast<float>(offset));
  const auto random = [&](int64_t count, uint32_t seed) { return test::RandomValues(count, seed, 1.5, kind.precision); };
  const Values x = random(rows * width, 1), gamma = random(width, 2), beta = random(width, 3), dy = random(rows * width, 4),
               residual = random(rows * width, 5), before = test::RandomValues(width, 6, 1.0, DType::kF32);
  const Shape shape{rows, width};
  const Owned x_data(kind.storage, shape, x), gamma_data(kind.storage, {width}, gamma), beta_data(kind.storage, {width}, beta);
  const Owned y(kind.storage, shape), mean(DType::kF32, {rows}), rstd(DType::kF32, {rows});
  LayerNormForward({}, x_data, gamma_data, beta_data, options, y, mean, rstd);
  // In the place of dy, or of the residual's gradient.
  const Owned dy_data(kind.storage, shape, dy), joined(kind.storage, shape, residual), gamma_grad(DType::kF32, {width}, before),
      beta_grad(DType::kF32, {width}, before);
  const Owned& dx = has_residual ? joined : dy_data;
  LayerNormBackward({}, dy_data, x_data, gamma_data, mean, rstd, has_residual ? joined.tensor() : Tensor(), options, dx,
                    gamma_grad, beta_grad);

  Bounds expected_y, expected_mean, expected_rstd, expected_dx, expected_gamma, expected_beta;
  std::vector<test::Sum> gamma_sums(width), beta_sums(width);
  for (int64_t i = 0; i < rows; ++i) {
    const double* row = &x[i * width];
    const RowSums sums = SumsOf(row, width);
    expected_mean.push_back(sums.mean);
    expected_rstd.push_back(sums.rstd);
    test::Sum t_sum, dots;
    Bounds t(width), normal(width);
    for (int64_t j = 0; j < width; ++j) {
      expected_y.push_back(Stored((row[j] - sums.mean) * sums.rstd * (gamma[j] + offset) + beta[j], kind.precision));
      normal[j] = (row[j] - Bounded(mean[i])) * rstd[i];
      t[j] = dy[i * width + j] * (Bounded(gamma[j]) + offset);
      t_sum.Add(t[j]);
      dots.Add(t[j] * normal[j]);
      gamma_sums[j].Add(dy[i * width + j] * normal[j]);
      beta_sums[j].Add(dy[i * width + j]);
    }
    const Bounded mean_t = t_sum.Total() / static_cast<double>(width), mean_dot = dots.Total() / static_cast<double>(width);
    for (int64_t j = 0; j < width; ++j) {
      const Bounded alone = Stored(rstd[i] * (t[j] - mean_t - normal[j] * mean_dot), kind.precision);
      expected_dx.push_back(has_residual ? Stored(residual[i * width + j] + alone, kind.precision) : alone);
    }
  }
  for (int64_t j = 0; j < width; ++j) {
    expected_gamma.push_back(before[j] + Stored(gamma_sums[j].Total(), kind.precision));
    expected_beta.push_back(before[j] + Stored(beta_sums[j].Total(), kind.precision));
  }
  test::ExpectBounded("LayerNormForward's y", kind, y, expected_y);
  test::ExpectBounded("LayerNormForward's mean", kind, mean, expected_mean);
  test::ExpectBounded("LayerNormForward's rstd", kind, rstd, expected_rstd);
  const std::string backward = has_residual ? "LayerNormBackward with a residual: " : "LayerNormBackward: ";
  test::ExpectBounded(backward + "dx", kind, dx, expected_dx);
  test::ExpectBounded(backward + "gamma_grad", kind, gamma_grad, expected_gamma);
  test::ExpectBounded(backward + "beta_grad", kind, beta_grad, expected_beta);
}

TEST(LayerNormTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, width] : kNarrowShapes) {
      for (const bool has_residual : {false, true}) CheckNarrow(kind, rows, width, has_residual);
    }
  }
}

}  // namespace
}  // namespace mbridge
