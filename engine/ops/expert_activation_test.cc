#include "engine/ops/expert_activation.h"

#include <algorithm>

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

// Four rows of two experts for two tokens with two choices each.
constexpr int64_t kRows = 4, kWidth = 7;
const Values kSlots = {1, 2, 0, 3};

struct Sorted {
  const Owned offsets{DType::kI32, {3}, {0, 2, 4}}, slots{DType::kI32, {4}, kSlots}, places{DType::kI32, {4}, {2, 0, 1, 3}};
  ExpertRows view() const { return {offsets, slots, places}; }
};

double Gate(GateKind kind, double u) { return u / (1 + std::exp(-(kind == GateKind::kQuickGelu ? 1.702 : 1.0) * u)); }

// Without roundings.
Values Reference(const Values& x, const Values& p, const ExpertActivationOptions& o) {
  Values y;
  const double limit = o.clamp > 0 ? o.clamp : 1e30;
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    const int64_t row = i / kWidth, j = row * 2 * kWidth + i % kWidth;
    const double u1 = std::min(x[j], limit), u2 = std::clamp(x[j + kWidth], -limit, limit) + o.linear_offset;
    y.push_back(Gate(o.gate, u1) * u2 * p[static_cast<int64_t>(kSlots[row])]);
  }
  return y;
}

TEST(ExpertActivationTest, ForwardAndBackward) {
  const Sorted rows;
  for (const Kind& kind : test::kKinds) {
    for (ExpertActivationOptions o :
         {ExpertActivationOptions{}, {.fused = false}, {.gate = GateKind::kQuickGelu, .clamp = 2.03f, .linear_offset = 1.0f}}) {
      o.precision = kind.precision;
      const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0, kind.precision),
                   p = test::RandomValues(4, 2, 1.0, kind.precision),
                   dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
      const Owned x_data(kind.storage, {kRows, 2 * kWidth}, x), p_data(DType::kF32, {2, 2}, p), y(kind.storage, {kRows, kWidth});
      const double steps = o.fused ? 1 : 4;
      ExpertActivationForward({}, x_data, rows.view(), p_data, o, y);
      test::ExpectNear(y.ToValues(), Reference(x, p, o), steps * kind.epsilon(), 2e-6);

      const Owned dx(kind.storage, {kRows, 2 * kWidth}), dp(DType::kF32, {2, 2});
      ExpertActivationBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), x_data, rows.view(), p_data, o, dx, dp);
      const Values slope = test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, p, o), dy); });
      test::ExpectNear(dx.ToValues(), slope, steps * kind.epsilon(), 1e-5);
      const Values p_slope = test::NumericGradient(p, [&](const Values& v) { return test::Dot(Reference(x, v, o), dy); });
      test::ExpectNear(dp.ToValues(), p_slope, o.fused ? 1e-5 : kind.epsilon(), o.fused ? 1e-5 : 30 * kind.epsilon());
    }
  }
}

TEST(ExpertActivationTest, BiasesOfTheExperts) {
  const Sorted rows;
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kRows * kWidth, 1, 1.0, kind.precision),
                 p = test::RandomValues(4, 2, 1.0, kind.precision),
                 dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
    Values b[2] = {test::RandomValues(kWidth, 4, 1.0, kind.precision), test::RandomValues(kWidth, 5, 1.0, kind.precision)};
    const Owned first(kind.storage, {kWidth}, b[0]), second(kind.storage, {kWidth}, b[1]);
    const std::vector<Tensor> biases = {first, second};
    for (const bool weighted : {false, true}) {
      const Owned y(kind.storage, {kRows, kWidth}, x), p_data(DType::kF32, {2, 2}, p);
      ExpertBiasAdd({}, y, biases, rows.view(), weighted ? p_data.tensor() : Tensor(), kind.precision);
      const Owned grads[2] = {{DType::kF32, {kWidth}}, {DType::kF32, {kWidth}}}, dp(DType::kF32, {2, 2}, {1, 1, 1, 1});
      const std::vector<Tensor> grad_tensors = {grads[0], grads[1]};
      ExpertBiasBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), biases, rows.view(), weighted ? p_data.tensor() : Tensor(),
                         kind.precision, grad_tensors, dp);
      Values expected, sums[2] = {Values(kWidth), Values(kWidth)}, expected_dp = {1, 1, 1, 1};
      for (int64_t i = 0; i < kRows * kWidth; ++i) {
        const int64_t row = i / kWidth, j = i % kWidth, slot = static_cast<int64_t>(kSlots[row]);
        const double weight = weighted ? p[slot] : 1.0;
        expected.push_back(x[i] + weight * b[row / 2][j]);
        sums[row / 2][j] += weight * dy[i];
        if (weighted) expected_dp[slot] += dy[i] * b[row / 2][j];
      }
      test::ExpectNear(y.ToValues(), expected, kind.epsilon(), kind.epsilon());
      test::ExpectNear(dp.ToValues(), expected_dp, 1e-5, 1e-5);
      for (int e = 0; e < 2; ++e) test::ExpectNear(grads[e].ToValues(), sums[e], kind.epsilon(), 1e-6);
    }
  }
}

TEST(ExpertActivationTest, SharedGate) {
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kRows * kWidth, 1, 1.0, kind.precision),
                 g = test::RandomValues(kRows, 2, 2.0, kind.precision),
                 dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
    const auto reference = [](const Values& inputs, const Values& gates) {
      Values y;
      for (int64_t i = 0; i < kRows * kWidth; ++i) y.push_back(inputs[i] / (1 + std::exp(-gates[i / kWidth])));
      return y;
    };
    const Owned x_data(kind.storage, {kRows, kWidth}, x), g_data(DType::kF32, {kRows, 1}, g), y(kind.storage, {kRows, kWidth}),
        dx(kind.storage, {kRows, kWidth}), dg(DType::kF32, {kRows, 1});
    SharedGateForward({}, x_data, g_data, kind.precision, y);
    test::ExpectNear(y.ToValues(), reference(x, g), 2 * kind.epsilon(), 1e-6);
    SharedGateBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), x_data, g_data, kind.precision, dx, dg);
    test::ExpectNear(dx.ToValues(), test::NumericGradient(x, [&](const Values& v) { return test::Dot(reference(v, g), dy); }),
                     2 * kind.epsilon(), 1e-6);
    test::ExpectNear(dg.ToValues(), test::NumericGradient(g, [&](const Values& v) { return test::Dot(reference(x, v), dy); }),
                     4 * kind.epsilon(), 1e-6);
  }
}

}  // namespace
}  // namespace mbridge
