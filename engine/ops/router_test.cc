#include "engine/ops/router.h"

#include <algorithm>

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::Values;

constexpr int64_t kTokens = 12, kExperts = 8;

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Values SoftmaxRow(const Values& logits, int64_t token) {
  Values row(logits.begin() + token * kExperts, logits.begin() + (token + 1) * kExperts);
  double sum = 0;
  for (double& x : row) sum += x = std::exp(x);
  for (double& x : row) x /= sum;
  return row;
}

Values ScoresOf(const Values& logits, RouterScore kind) {
  Values scores;
  for (int64_t t = 0; t < kTokens; ++t) {
    Values row = SoftmaxRow(logits, t);
    for (int64_t e = 0; e < kExperts && kind == RouterScore::kSigmoid; ++e) row[e] = Sigmoid(logits[t * kExperts + e]);
    scores.insert(scores.end(), row.begin(), row.end());
  }
  return scores;
}

// Probabilities of a given choice.
Values ProbabilitiesOf(const Values& logits, const Values& experts, const RouterOptions& o) {
  const Values scores = ScoresOf(logits, o.score);
  Values p;
  for (int64_t t = 0; t < kTokens; ++t) {
    double sum = 0;
    for (int64_t i = 0; i < o.topk; ++i) sum += scores[t * kExperts + static_cast<int64_t>(experts[t * o.topk + i])];
    const bool keep = o.score == RouterScore::kSoftmax || (o.score == RouterScore::kSigmoid && o.topk == 1);
    for (int64_t i = 0; i < o.topk; ++i) {
      p.push_back(o.scaling * scores[t * kExperts + static_cast<int64_t>(experts[t * o.topk + i])] / (keep ? 1 : sum));
    }
  }
  return p;
}

struct Routed {
  Owned scores, experts, probabilities;
  explicit Routed(const RouterOptions& o)
      : scores(DType::kF32, {kTokens, kExperts}),
        experts(DType::kI32, {kTokens, o.topk}),
        probabilities(DType::kF32, {kTokens, o.topk}) {}
};

Routed Route(const Values& logits, const Values& bias, const RouterOptions& o) {
  Routed routed(o);
  const Owned bias_data(DType::kF32, {kExperts}, bias.empty() ? Values(kExperts) : bias);
  RouterForward({}, Owned(DType::kF32, {kTokens, kExperts}, logits), bias.empty() ? Tensor() : bias_data.tensor(), o,
                routed.scores, routed.experts, routed.probabilities);
  return routed;
}

std::vector<RouterOptions> AllOptions() {
  std::vector<RouterOptions> all;
  for (const RouterScore score : {RouterScore::kSoftmaxOfChosen, RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const int64_t k : {1, 2, 3}) {
      all.push_back({.score = score, .topk = k, .scaling = 2.5f});
      all.push_back({.score = score, .topk = k, .groups = 4, .group_topk = 2, .group_experts = 2});
    }
  }
  return all;
}

TEST(RouterTest, ChoosesTheBest) {
  const Values logits = test::RandomValues(kTokens * kExperts, 1, 3.0, DType::kF32);
  for (const RouterOptions& o : AllOptions()) {
    const Values bias = o.score == RouterScore::kSigmoid ? test::RandomValues(kExperts, 2, 0.5, DType::kF32) : Values();
    const Routed routed = Route(logits, bias, o);
    const Values scores = ScoresOf(logits, o.score), chosen = routed.experts.ToValues();
    test::ExpectNear(routed.scores.ToValues(), scores, 1e-6, 1e-7);
    test::ExpectNear(routed.probabilities.ToValues(), ProbabilitiesOf(logits, chosen, o), 2e-6, 1e-7);
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto key = [&](int64_t e) {
        return (o.score == RouterScore::kSoftmaxOfChosen ? logits : scores)[t * kExperts + e] + (bias.empty() ? 0.0 : bias[e]);
      };
      std::vector<int64_t> allowed;
      if (o.groups > 0) {  // Of four pairs the two with the largest sums.
        std::vector<int64_t> pairs = {0, 1, 2, 3};
        std::sort(pairs.begin(), pairs.end(),
                  [&](int64_t a, int64_t b) { return key(2 * a) + key(2 * a + 1) > key(2 * b) + key(2 * b + 1); });
        for (int64_t i = 0; i < 2; ++i) allowed.insert(allowed.end(), {2 * pairs[i], 2 * pairs[i] + 1});
      } else {
        for (int64_t e = 0; e < kExperts; ++e) allowed.push_back(e);
      }
      std::sort(allowed.begin(), allowed.end(), [&](int64_t a, int64_t b) { return key(a) > key(b); });
      for (int64_t i = 0; i < o.topk; ++i) EXPECT_EQ(chosen[t * o.topk + i], static_cast<double>(allowed[i])) << "token " << t;
    }
  }
}

TEST(RouterTest, EqualLogitsGoToTheLowerIndex) {
  const RouterOptions o{.topk = 3};
  EXPECT_EQ(Route(Values(kTokens * kExperts, 0.5), {}, o).experts.ToValues()[2], 2);
}

TEST(RouterTest, BackwardAgainstFiniteDifferences) {
  const Values logits = test::RandomValues(kTokens * kExperts, 1, 3.0, DType::kF32);
  for (const RouterOptions& o : AllOptions()) {
    const Routed routed = Route(logits, {}, o);
    const Values experts = routed.experts.ToValues(), d = test::RandomValues(kTokens * o.topk, 3, 1.0, DType::kF32);
    const Owned d_logits(DType::kF32, {kTokens, kExperts});
    RouterBackward({}, Owned(DType::kF32, {kTokens, o.topk}, d), Owned(DType::kF32, {kTokens, kExperts}, logits), routed.scores,
                   routed.experts, o, {}, d_logits);
    test::ExpectNear(d_logits.ToValues(),
                     test::NumericGradient(logits, [&](const Values& x) { return test::Dot(ProbabilitiesOf(x, experts, o), d); }),
                     1e-5, 2e-6);
  }
}

// coefficient E / (k n^2 sequences) sum c score, plus z_coefficient mean(logsumexp^2).
double Auxiliary(const Values& logits, const Values& counts, const RouterOptions& o, int64_t sequences, double coefficient,
                 double z_coefficient) {
  const Values scores = ScoresOf(logits, o.score);
  const double n = static_cast<double>(kTokens) / static_cast<double>(sequences);
  double loss = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    double total = 0, exponentials = 0;
    for (int64_t e = 0; e < kExperts; ++e) {
      total += scores[t * kExperts + e];
      exponentials += std::exp(logits[t * kExperts + e]);
    }
    for (int64_t e = 0; e < kExperts; ++e) {
      loss += coefficient * kExperts / (static_cast<double>(o.topk) * n * n * static_cast<double>(sequences)) *
              counts[t % sequences * kExperts + e] * scores[t * kExperts + e] / total;
    }
    loss += z_coefficient / kTokens * std::log(exponentials) * std::log(exponentials);
  }
  return loss;
}

TEST(RouterTest, BalanceAndZLoss) {
  const Values logits = test::RandomValues(kTokens * kExperts, 5, 2.0, DType::kF32);
  for (const RouterScore score : {RouterScore::kSoftmaxOfChosen, RouterScore::kSigmoid}) {
    for (const int64_t sequences : {1, 3}) {
      const RouterOptions o{.score = score, .topk = 2};
      const Routed routed = Route(logits, {}, o);
      Values counts(sequences * kExperts);
      for (int64_t i = 0; i < kTokens * o.topk; ++i) {
        counts[i / o.topk % sequences * kExperts + static_cast<int64_t>(routed.experts[i])] += 1;
      }
      const Owned loss(DType::kF32, {1}), slopes(DType::kF32, {sequences, kExperts}), d_logits(DType::kF32, {kTokens, kExperts});
      RouterBalanceLoss({}, routed.scores, o, 0.1f, 1.0f, loss, slopes);
      EXPECT_NEAR(loss[0], Auxiliary(logits, counts, o, sequences, 0.1, 0), 1e-6);
      RouterBackward({}, Owned(DType::kF32, {kTokens, o.topk}, Values(kTokens * o.topk)),
                     Owned(DType::kF32, {kTokens, kExperts}, logits), routed.scores, routed.experts, o,
                     {.slopes = slopes, .z_slope = 2 * 0.2f / kTokens}, d_logits);
      test::ExpectNear(
          d_logits.ToValues(),
          test::NumericGradient(logits, [&](const Values& x) { return Auxiliary(x, counts, o, sequences, 0.1, 0.2); }), 1e-5,
          1e-6);
    }
  }
}

TEST(RouterTest, RoundsToTheModelsType) {
  const RouterOptions o{.topk = 2, .precision = DType::kBF16};
  const Values logits = test::RandomValues(kTokens * kExperts, 1, 3.0, DType::kF32);
  const Routed routed = Route(logits, {}, o);
  for (int64_t i = 0; i < kTokens * 2; ++i) {
    EXPECT_EQ(routed.probabilities[i], test::RoundTo(DType::kBF16, routed.probabilities[i]));
  }
}

TEST(RouterTest, ExpertBiasMovesTowardsEqualLoad) {
  const Owned bias(DType::kF32, {4}, {0.5, 0, 0, -1});
  UpdateExpertBias({}, Owned(DType::kF32, {4}, {10, 20, 30, 20}), 0.25f, bias);
  EXPECT_EQ(bias.ToValues(), (Values{0.75, 0, -0.25, -1}));
}

TEST(RouterTest, RefusesMoreThanTheGroupsHold) {
  const RouterOptions o{.topk = 3, .groups = 4, .group_topk = 1, .group_experts = 1};
  EXPECT_THROW(Route(Values(kTokens * kExperts), {}, o), EngineError);
}

}  // namespace
}  // namespace mbridge
