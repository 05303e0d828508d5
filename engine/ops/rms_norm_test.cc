#include "engine/ops/rms_norm.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kWidth = 37;
constexpr float kEpsilon = 1e-2f;  // Large enough to matter.

// One row of `count` elements.
void NormRow(const double* x, const double* gamma, int64_t count, double* y) {
  double squares = 0;
  for (int64_t j = 0; j < count; ++j) squares += x[j] * x[j] / static_cast<double>(count);
  for (int64_t j = 0; j < count; ++j) y[j] = x[j] / std::sqrt(squares + kEpsilon) * gamma[j];
}

Values Reference(const Values& x, const Values& gamma) {
  Values y(x.size());
  for (int64_t i = 0; i < kRows; ++i) NormRow(x.data() + i * kWidth, gamma.data(), kWidth, y.data() + i * kWidth);
  return y;
}

// Rounded, then added to what was there.
Values Accumulated(Values gradient, DType precision, double before) {
  for (double& v : gradient) v = test::RoundTo(precision, v) + before;
  return gradient;
}

TEST(RmsNormTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision),
                 gamma = test::RandomValues(kWidth, 2, 1.5, kind.precision),
                 dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
    const Owned x_data(kind.storage, {kRows, kWidth}, x), gamma_data(kind.storage, {kWidth}, gamma);
    const Owned dy_data(kind.storage, {kRows, kWidth}, dy), y(kind.storage, {kRows, kWidth}), dx(kind.storage, {kRows, kWidth});
    const Owned rstd(DType::kF32, {kRows}), gamma_grad(DType::kF32, {kWidth}, Values(kWidth, 1.0));
    RmsNormForward({}, x_data, gamma_data, kEpsilon, kind.precision, y, rstd);
    RmsNormBackward({}, dy_data, x_data, gamma_data, rstd, {}, kind.precision, dx, gamma_grad);
    test::ExpectNear(y.ToValues(), Reference(x, gamma), kind.epsilon(), 1e-6);
    for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
    test::ExpectNear(dx.ToValues(), test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, gamma), dy); }),
                     kind.epsilon(), 2e-6);
    const Values slope = test::NumericGradient(gamma, [&](const Values& v) { return test::Dot(Reference(x, v), dy); });
    test::ExpectNear(gamma_grad.ToValues(), Accumulated(slope, kind.precision, 1.0), kind.epsilon(), 2 * kind.epsilon());
  }
}

TEST(RmsNormTest, BackwardJoinsTheResidualGradientWithASecondRounding) {
  for (const Kind& kind : test::kKinds) {
    const Values residual = test::RandomValues(kRows * kWidth, 5, 1.0, kind.precision);
    const Owned x(kind.storage, {kRows, kWidth}, test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision)),
        gamma(kind.storage, {kWidth}, test::RandomValues(kWidth, 2, 1.5, kind.precision)),
        dy(kind.storage, {kRows, kWidth}, test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision));
    const Owned y(kind.storage, {kRows, kWidth}), alone(kind.storage, {kRows, kWidth}),
        joined(kind.storage, {kRows, kWidth}, residual);
    const Owned rstd(DType::kF32, {kRows}), gamma_grad(DType::kF32, {kWidth});
    RmsNormForward({}, x, gamma, kEpsilon, kind.precision, y, rstd);
    RmsNormBackward({}, dy, x, gamma, rstd, {}, kind.precision, alone, gamma_grad);
    RmsNormBackward({}, dy, x, gamma, rstd, joined, kind.precision, joined, gamma_grad);
    for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(joined[i], test::RoundTo(kind.precision, residual[i] + alone[i])) << i;
  }
}

constexpr QkvLayout kLayout{.heads = 4, .groups = 2, .head_size = 6};

// Groups of two queries, a key and a value: slots 0, 1 and 2 of every four are normalised.
Values QkReference(const Values& qkv, const Values& query_gamma, const Values& key_gamma) {
  Values y = qkv;
  const int64_t d = kLayout.head_size;
  for (int64_t slot = 0; slot * d < static_cast<int64_t>(qkv.size()); ++slot) {
    if (slot % 4 == 3) continue;
    NormRow(qkv.data() + slot * d, (slot % 4 == 2 ? key_gamma : query_gamma).data(), d, y.data() + slot * d);
  }
  return y;
}

TEST(QkNormTest, ForwardAndBackward) {
  const int64_t width = kLayout.width(), d = kLayout.head_size;
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kRows * width, 1, 2.0, kind.precision), dy = test::RandomValues(kRows * width, 3);
    const Values query = test::RandomValues(d, 2, 1.5, kind.precision), key = test::RandomValues(d, 4, 1.5, kind.precision);
    const Owned x_data(kind.storage, {kRows, width}, x), q(kind.storage, {d}, query), k(kind.storage, {d}, key);
    const Owned gradient(kind.storage, {kRows, width}, dy), y(kind.storage, {kRows, width});
    const Owned rstd(DType::kF32, {kRows, 6}), q_grad(DType::kF32, {d}, Values(d, 1.0)), k_grad(DType::kF32, {d});
    QkNormForward({}, x_data, q, k, kLayout, kEpsilon, kind.precision, y, rstd);
    test::ExpectNear(y.ToValues(), QkReference(x, query, key), kind.epsilon(), 1e-6);
    QkNormBackward({}, gradient, x_data, q, k, rstd, kLayout, kind.precision, q_grad, k_grad);
    const auto loss = [&](const Values& a, const Values& b, const Values& c) { return test::Dot(QkReference(a, b, c), dy); };
    test::ExpectNear(gradient.ToValues(), test::NumericGradient(x, [&](const Values& v) { return loss(v, query, key); }),
                     kind.epsilon(), 2e-6);
    const Values q_slope = test::NumericGradient(query, [&](const Values&v) { return loss(x, v, key); }),
                 k_slope = test::NumericGradient(key, [&](const Values&v) { return loss(x, query, v); });
    test::ExpectNear(q_grad.ToValues(), Accumulated(q_slope, kind.precision, 1.0), kind.epsilon(), 2 * kind.epsilon());
    test::ExpectNear(k_grad.ToValues(), Accumulated(k_slope, kind.precision, 0.0), kind.epsilon(), 2 * kind.epsilon());
  }
}

}  // namespace
}  // namespace mbridge
