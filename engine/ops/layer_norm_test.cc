#include "engine/ops/layer_norm.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

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

}  // namespace
}  // namespace mbridge
