#include "engine/ops/expert_activation.h"

#include <algorithm>

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
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

// Rows of some experts, one of which has none.
struct NarrowRows {
  NarrowRows(int64_t tokens, int64_t k, int64_t experts)
      : offsets(DType::kI32, {experts + 1}), slots(DType::kI32, {tokens * k}), places(DType::kI32, {tokens * k}) {
    Values chosen;
    for (int64_t slot = 0; slot < tokens * k; ++slot)
      chosen.push_back(static_cast<double>((slot * 7 + slot / 3) % (experts - 1)));
    SortByExpert({}, Owned(DType::kI32, {tokens, k}, chosen), view());
  }
  ExpertRows view() const { return {offsets, slots, places}; }
  int64_t Slot(int64_t row) const { return static_cast<int64_t>(slots[row]); }
  Owned offsets, slots, places;
};

constexpr int64_t kChoices = 2;

void CheckNarrowGate(const Kind& kind, ExpertActivationOptions o, int64_t tokens, int64_t n) {
  o.precision = kind.precision;
  const NarrowRows sorted(tokens, kChoices, 5);
  const int64_t rows = tokens * kChoices;
  const Values x = test::RandomValues(rows * 2 * n, 1, 4.0, kind.precision),
               p = test::RandomValues(rows, 2, 1.0, o.router_precision),
               dy = test::RandomValues(rows * n, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, 2 * n}, x), p_data(DType::kF32, {tokens, kChoices}, p), y(kind.storage, {rows, n}),
      dx(kind.storage, {rows, 2 * n}), dp(DType::kF32, {tokens, kChoices});
  ExpertActivationForward({}, x_data, sorted.view(), p_data, o, y);
  ExpertActivationBackward({}, Owned(kind.storage, {rows, n}, dy), x_data, sorted.view(), p_data, o, dx, dp);
  const auto step = [&](const Bounded& v) { return o.fused ? v : Stored(v, kind.precision); };
  const double limit = o.clamp > 0 ? o.clamp : 1e30;
  const Bounded slope = o.gate == GateKind::kQuickGelu ? test::Constant(1.702) : Bounded(1);
  Bounds expected_y(rows * n), expected_dx(rows * 2 * n), expected_dp(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const double weight = p[sorted.Slot(row)];
    test::Sum sum;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = row * 2 * n + j, i = row * n + j;
      const Bounded u1 = std::min(x[at], limit), u2 = Bounded(std::clamp(x[at + n], -limit, limit)) + o.linear_offset;
      const Bounded s = Sigmoid(slope * u1), gate = step(u1 * s), weighted = step(Bounded(dy[i]) * weight);
      expected_y[i] = Stored(step(gate * u2) * weight, kind.precision);
      if (x[at] <= limit) expected_dx[at] = Stored(step(weighted * u2) * s * (1 + slope * u1 * (1 - s)), kind.precision);
      if (std::fabs(x[at + n]) <= limit) expected_dx[at + n] = Stored(weighted * gate, kind.precision);
      sum.Add(dy[i] * step(gate * u2));
    }
    expected_dp[sorted.Slot(row)] = o.router_precision == DType::kF32 ? sum.Total() : Stored(sum.Total(), kind.precision);
  }
  const std::string variant = std::string(o.fused ? ", fused" : ", eager") + (o.clamp > 0 ? ", clamped quick GELU" : "");
  test::ExpectBounded("ExpertActivationForward" + variant, kind, y, expected_y);
  test::ExpectBounded("ExpertActivationBackward's dx" + variant, kind, dx, expected_dx);
  test::ExpectBounded("ExpertActivationBackward's d_probabilities" + variant, kind, dp, expected_dp);
}

void CheckNarrowBiases(const Kind& kind, int64_t tokens, int64_t n, bool weighted) {
  constexpr int64_t experts = 5;
  const NarrowRows sorted(tokens, kChoices, experts);
  const int64_t rows = tokens * kChoices;
  const Values x = test::RandomValues(rows * n, 1, 1.0, kind.precision), p = test::RandomValues(rows, 2, 1.0, DType::kF32),
               dy = test::RandomValues(rows * n, 3, 1.0, kind.precision),
               b = test::RandomValues(experts * n, 4, 1.0, kind.precision),
               before = test::RandomValues(experts * n, 5, 1.0, DType::kF32);
  const Owned all_biases(kind.storage, {experts, n}, b), all_grads(DType::kF32, {experts, n}, before),
      y(kind.storage, {rows, n}, x), p_data(DType::kF32, {tokens, kChoices}, p),
      dp(DType::kF32, {tokens, kChoices}, Values(rows, 1.0));
  std::vector<Tensor> biases, grads;
  for (int64_t e = 0; e < experts; ++e) {
    biases.push_back(all_biases.tensor().Rows(e, 1));
    grads.push_back(all_grads.tensor().Rows(e, 1));
  }
  const Tensor probabilities = weighted ? p_data.tensor() : Tensor();
  ExpertBiasAdd({}, y, biases, sorted.view(), probabilities, kind.precision);
  ExpertBiasBackward({}, Owned(kind.storage, {rows, n}, dy), biases, sorted.view(), probabilities, kind.precision, grads, dp);
  Bounds expected_y, expected_grads, expected_dp(rows, 1.0);
  std::vector<test::Sum> sums(experts * n);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t e = 0;
    while (sorted.offsets[e + 1] <= static_cast<double>(row)) ++e;
    const double weight = weighted ? p[sorted.Slot(row)] : 1.0;
    test::Sum dot;
    for (int64_t j = 0; j < n; ++j) {
      expected_y.push_back(Stored(x[row * n + j] + Stored(Bounded(b[e * n + j]) * weight, kind.precision), kind.precision));
      sums[e * n + j].Add(Bounded(dy[row * n + j]) * weight);
      dot.Add(Bounded(dy[row * n + j]) * b[e * n + j]);
    }
    if (weighted) expected_dp[sorted.Slot(row)] = 1 + dot.Total();
  }
  for (int64_t i = 0; i < experts * n; ++i) expected_grads.push_back(before[i] + Stored(sums[i].Total(), kind.precision));
  const std::string variant = weighted ? ", weighted" : "";
  test::ExpectBounded("ExpertBiasAdd" + variant, kind, y, expected_y);
  test::ExpectBounded("ExpertBiasBackward's main_grads" + variant, kind, all_grads, expected_grads);
  test::ExpectBounded("ExpertBiasBackward's d_probabilities" + variant, kind, dp, expected_dp);
}

void CheckNarrowSharedGate(const Kind& kind, int64_t tokens, int64_t n) {
  const Values x = test::RandomValues(tokens * n, 1, 1.0, kind.precision),
               logits = test::RandomValues(tokens, 2, 3.0, DType::kF32),
               dy = test::RandomValues(tokens * n, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {tokens, n}, x), logits_data(DType::kF32, {tokens, 1}, logits), y(kind.storage, {tokens, n}),
      dx(kind.storage, {tokens, n}, dy), d_logits(DType::kF32, {tokens, 1});
  SharedGateForward({}, x_data, logits_data, kind.precision, y);
  SharedGateBackward({}, dx, x_data, logits_data, kind.precision, dx, d_logits);
  Bounds expected_y, expected_dx, expected_d;
  for (int64_t t = 0; t < tokens; ++t) {
    const Bounded gate = Stored(test::Sigmoid(test::RoundTo(kind.precision, logits[t])), kind.precision);
    test::Sum dot;
    for (int64_t j = 0; j < n; ++j) {
      expected_y.push_back(Stored(x[t * n + j] * gate, kind.precision));
      expected_dx.push_back(Stored(dy[t * n + j] * gate, kind.precision));
      dot.Add(Bounded(dy[t * n + j]) * x[t * n + j]);
    }
    expected_d.push_back(Stored(Stored(dot.Total(), kind.precision) * gate * (1 - gate), kind.precision));
  }
  test::ExpectBounded("SharedGateForward", kind, y, expected_y);
  test::ExpectBounded("SharedGateBackward's dx", kind, dx, expected_dx);
  test::ExpectBounded("SharedGateBackward's d_logits", kind, d_logits, expected_d);
}

TEST(ExpertActivationTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [tokens, n] : test::kAwkwardShapes) {
      for (const ExpertActivationOptions& o : {ExpertActivationOptions{},
                                               {.fused = false, .router_precision = kind.precision},
                                               {.gate = GateKind::kQuickGelu, .clamp = 2.03f, .linear_offset = 1.0f}}) {
        CheckNarrowGate(kind, o, tokens, n);
      }
      for (const bool weighted : {false, true}) CheckNarrowBiases(kind, tokens, n, weighted);
      CheckNarrowSharedGate(kind, tokens, n);
    }
  }
}

}  // namespace
}  // namespace mbridge
