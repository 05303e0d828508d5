#include "engine/ops/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

// Megatron-Core's guard of the division by a sum of sigmoids.
constexpr float kTiny = 1e-20f;

float RoundTo(DType precision, float x) {
  if (precision == DType::kBF16) return cpu::RoundToBF16(x);
  return precision == DType::kF16 ? ToFloat(ToFloat16(x)) : x;
}

// Memory of one thread for one token.
struct RowScratch {
  std::vector<float> logits, keys, values;
  std::vector<std::pair<float, int64_t>> groups;
  explicit RowScratch(int64_t experts) : logits(experts), keys(experts), values(experts) {}
};

// The k largest keys, best first, the lower index of equals first. k is small: one pass each.
void TopK(const float* keys, int64_t count, int64_t k, int32_t* chosen) {
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      if (best >= 0 && !(keys[e] > keys[best])) continue;
      if (std::find(chosen, chosen + i, static_cast<int32_t>(e)) == chosen + i) best = e;
    }
    chosen[i] = static_cast<int32_t>(best);
  }
}

// Keys outside the best groups become -infinity.
void LimitToGroups(const RouterOptions& o, RowScratch* row) {
  if (o.groups <= 1 || o.group_topk >= o.groups) return;
  const int64_t size = static_cast<int64_t>(row->keys.size()) / o.groups;
  row->groups.clear();
  for (int64_t g = 0; g < o.groups; ++g) {
    float* best = row->values.data();
    std::partial_sort_copy(row->keys.begin() + g * size, row->keys.begin() + (g + 1) * size, best, best + o.group_experts,
                           std::greater<>());
    float sum = 0.0f;
    for (int64_t i = 0; i < o.group_experts; ++i) sum += best[i];
    row->groups.emplace_back(sum, g);
  }
  std::stable_sort(row->groups.begin(), row->groups.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (size_t i = o.group_topk; i < row->groups.size(); ++i) {
    std::fill_n(row->keys.begin() + row->groups[i].second * size, size, -std::numeric_limits<float>::infinity());
  }
}

// Softmax of `count` values in place; its logarithmic normaliser.
float Softmax(float* values, int64_t count) {
  const float largest = *std::max_element(values, values + count);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    values[i] = cpu::Exp(values[i] - largest);
    sum += values[i];
  }
  for (int64_t i = 0; i < count; ++i) values[i] /= sum;
  return largest + std::log(sum);
}

template <class Body> void ForEachToken(int64_t tokens, int64_t experts, Body&& body) {
#pragma omp parallel
  {
    RowScratch row(experts);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) body(t, &row);
  }
}

void LoadLogits(const Tensor& logits, int64_t token, DType precision, RowScratch* row) {
  const int64_t experts = logits.shape[1];
  const float* from = logits.as<float>() + token * experts;
  for (int64_t e = 0; e < experts; ++e) row->logits[e] = RoundTo(precision, from[e]);
}

void CheckRouter(const Tensor& logits, const RouterOptions& o) {
  const int64_t experts = logits.shape[1];
  const bool groups_fit =
      o.groups <= 1 || (experts % o.groups == 0 && o.group_topk >= 1 && o.group_experts >= 1 &&
                        o.group_experts <= experts / o.groups && o.topk <= experts / o.groups * std::min(o.group_topk, o.groups));
  if (o.topk >= 1 && o.topk <= experts && groups_fit) return;
  ThrowEngineError("router of {} experts: {} a token, {} of {} groups by their {} best", experts, o.topk, o.group_topk, o.groups,
                   o.group_experts);
}

void ForwardCpu(const Context&, const Tensor& logits, const Tensor& bias, const RouterOptions& o, const Tensor& scores,
                const Tensor& experts, const Tensor& probabilities) {
  CheckRouter(logits, o);
  const int64_t tokens = logits.shape[0], count = logits.shape[1], k = o.topk;
  const float* offset = bias.empty() ? nullptr : bias.as<float>();
  ForEachToken(tokens, count, [&](int64_t t, RowScratch* row) {
    LoadLogits(logits, t, o.precision, row);
    float* score = scores.as<float>() + t * count;
    std::copy_n(row->logits.begin(), count, score);
    if (o.score == RouterScore::kSigmoid) {
      for (int64_t e = 0; e < count; ++e) score[e] = cpu::Sigmoid(score[e]);
    } else {
      Softmax(score, count);
    }
    for (int64_t e = 0; e < count; ++e) {
      const float key = o.score == RouterScore::kSoftmaxOfChosen ? row->logits[e] : RoundTo(o.precision, score[e]);
      row->keys[e] = offset == nullptr ? key : key + offset[e];
    }
    LimitToGroups(o, row);
    int32_t* chosen = experts.as<int32_t>() + t * k;
    TopK(row->keys.data(), count, k, chosen);
    float* p = probabilities.as<float>() + t * k;
    const bool of_logits = o.score == RouterScore::kSoftmaxOfChosen;
    for (int64_t i = 0; i < k; ++i) p[i] = of_logits ? row->logits[chosen[i]] : RoundTo(o.precision, score[chosen[i]]);
    if (of_logits) Softmax(p, k);
    if (o.score == RouterScore::kSigmoid && k > 1) {
      float sum = 0.0f;
      for (int64_t i = 0; i < k; ++i) sum += p[i];
      sum = RoundTo(o.precision, RoundTo(o.precision, sum) + kTiny);
      for (int64_t i = 0; i < k; ++i) p[i] /= sum;
    }
    for (int64_t i = 0; i < k; ++i) p[i] = RoundTo(o.precision, RoundTo(o.precision, p[i]) * o.scaling);
  });
}

// gradient[e] = score[e] (slope[e] - sum of slope score): through the softmax.
void SoftmaxBackward(const float* score, int64_t count, float* slope) {
  float dot = 0.0f;
  for (int64_t e = 0; e < count; ++e) dot += slope[e] * score[e];
  for (int64_t e = 0; e < count; ++e) slope[e] = score[e] * (slope[e] - dot);
}

// slope[e]: of score[e] / (sum of all + tiny) on entry, of the logit on return; elements with a slope of a chosen few only count
// where `chosen` says so (null: all).
void SigmoidBackward(const float* score, const int32_t* chosen, int64_t count, bool normalised, float* slope) {
  const auto at = [chosen](int64_t i) { return chosen == nullptr ? i : int64_t{chosen[i]}; };
  float sum = kTiny, dot = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += score[at(i)];
  for (int64_t i = 0; i < count; ++i) dot += slope[i] * score[at(i)] / sum;
  for (int64_t i = 0; i < count; ++i) {
    const float s = score[at(i)], d = normalised ? (slope[i] - dot) / sum : slope[i];
    slope[i] = d * s * (1.0f - s);
  }
}

void ChoiceGradient(const float* d_probabilities, const float* score, const int32_t* chosen, const RouterOptions& o,
                    RowScratch* row, float* gradient) {
  const int64_t count = static_cast<int64_t>(row->logits.size()), k = o.topk;
  std::fill_n(gradient, count, 0.0f);
  float* slope = row->values.data();
  for (int64_t i = 0; i < k; ++i) slope[i] = RoundTo(o.precision, d_probabilities[i] * o.scaling);
  switch (o.score) {
    case RouterScore::kSoftmaxOfChosen:
      for (int64_t i = 0; i < k; ++i) row->keys[i] = row->logits[chosen[i]];
      Softmax(row->keys.data(), k);
      SoftmaxBackward(row->keys.data(), k, slope);
      for (int64_t i = 0; i < k; ++i) gradient[chosen[i]] = slope[i];
      break;
    case RouterScore::kSoftmax:
      for (int64_t i = 0; i < k; ++i) gradient[chosen[i]] = slope[i];
      SoftmaxBackward(score, count, gradient);
      break;
    case RouterScore::kSigmoid:
      SigmoidBackward(score, chosen, k, k > 1, slope);
      for (int64_t i = 0; i < k; ++i) gradient[chosen[i]] = slope[i];
      break;
  }
  for (int64_t e = 0; e < count; ++e) gradient[e] = RoundTo(o.precision, gradient[e]);
}

void BackwardCpu(const Context&, const Tensor& d_probabilities, const Tensor& logits, const Tensor& scores, const Tensor& experts,
                 const RouterOptions& o, const RouterAuxiliary& auxiliary, const Tensor& d_logits) {
  CheckRouter(logits, o);
  const int64_t tokens = logits.shape[0], count = logits.shape[1], k = o.topk;
  ForEachToken(tokens, count, [&](int64_t t, RowScratch* row) {
    LoadLogits(logits, t, o.precision, row);
    const float* score = scores.as<float>() + t * count;
    float* gradient = d_logits.as<float>() + t * count;
    ChoiceGradient(d_probabilities.as<float>() + t * k, score, experts.as<int32_t>() + t * k, o, row, gradient);
    if (!auxiliary.slopes.empty()) {
      float* slope = row->values.data();
      std::copy_n(auxiliary.slopes.as<float>() + t % auxiliary.slopes.shape[0] * count, count, slope);
      if (o.score == RouterScore::kSigmoid) {
        SigmoidBackward(score, nullptr, count, true, slope);
      } else {
        SoftmaxBackward(score, count, slope);
      }
      for (int64_t e = 0; e < count; ++e) gradient[e] += RoundTo(o.precision, slope[e]);
    }
    if (auxiliary.z_slope != 0.0f) {
      std::copy_n(row->logits.begin(), count, row->values.begin());
      const float factor = Softmax(row->values.data(), count) * auxiliary.z_slope;
      for (int64_t e = 0; e < count; ++e) gradient[e] += RoundTo(o.precision, factor * row->values[e]);
    }
    for (int64_t e = 0; e < count; ++e) gradient[e] = RoundTo(o.precision, gradient[e]);
  });
}

void BalanceCpu(const Context&, const Tensor& scores, const RouterOptions& o, float coefficient, float scale, const Tensor& loss,
                const Tensor& slopes) {
  const int64_t tokens = scores.shape[0], count = scores.shape[1], sequences = slopes.shape[0];
  std::vector<double> sums(sequences * count), counts(sequences * count);
  std::vector<int32_t> chosen(o.topk);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* score = scores.as<float>() + t * count;
    const int64_t first = t % sequences * count;
    double total = 1.0;
    if (o.score == RouterScore::kSigmoid) {
      total = kTiny;
      for (int64_t e = 0; e < count; ++e) total += score[e];
    }
    TopK(score, count, o.topk, chosen.data());
    for (int64_t e = 0; e < count; ++e) sums[first + e] += score[e] / total;
    for (const int32_t e : chosen) counts[first + e] += 1;
  }
  const double length = static_cast<double>(tokens) / static_cast<double>(sequences);
  const double factor =
      coefficient * static_cast<double>(count) / (static_cast<double>(o.topk) * length * length * static_cast<double>(sequences));
  double sum = 0;
  for (int64_t i = 0; i < sequences * count; ++i) {
    sum += factor * counts[i] * sums[i];
    slopes.as<float>()[i] = static_cast<float>(scale * factor * counts[i]);
  }
  loss.as<float>()[0] += static_cast<float>(sum);
}

void UpdateBiasCpu(const Context&, const Tensor& load, float rate, const Tensor& bias) {
  const float* loads = load.as<float>();
  double mean = 0;
  for (int64_t e = 0; e < load.size(); ++e) mean += loads[e] / static_cast<double>(load.size());
  for (int64_t e = 0; e < load.size(); ++e) {
    const double missing = mean - loads[e];
    bias.as<float>()[e] += missing > 0 ? rate : missing < 0 ? -rate : 0.0f;
  }
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const RouterOptions&, const Tensor&, const Tensor&, const Tensor&)>
    RouterForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const RouterOptions&, const RouterAuxiliary&,
        const Tensor&)>
    RouterBackward{&BackwardCpu};
Op<void(const Context&, const Tensor&, const RouterOptions&, float, float, const Tensor&, const Tensor&)> RouterBalanceLoss{
    &BalanceCpu};
Op<void(const Context&, const Tensor&, float, const Tensor&)> UpdateExpertBias{&UpdateBiasCpu};

}  // namespace mbridge
