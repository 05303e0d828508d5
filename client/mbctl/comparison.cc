#include "client/mbctl/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace mbridge::mbctl {
namespace {

Verdict Judge(double difference, double tolerance) {
  const double size = std::abs(difference);
  if (!(size <= 2 * tolerance)) return Verdict::kDifferent;  // Also NaN.
  return size <= tolerance ? Verdict::kEqual : Verdict::kClose;
}

Verdict Worse(Verdict a, Verdict b) { return std::max(a, b); }

struct Extreme {
  double size = 0;
  std::string label;
  bool nan = false;
  void Take(double difference, const std::string& where) {
    if (std::isnan(difference)) {
      if (!nan) label = where;
      nan = true;
    } else if (!nan && std::abs(difference) >= size) {
      size = std::abs(difference);
      label = where;
    }
  }
};

}  // namespace

std::string VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kEqual: return "equal";
    case Verdict::kClose: return "close";
    case Verdict::kDifferent: break;
  }
  return "DIFFERENT";
}

Comparison Compare(const LossSeries& a, const LossSeries& b, const ComparisonLimits& limits) {
  Comparison result;
  Extreme loss, norm;
  size_t iterations = 0;
  bool norms_differ = false;
  result.verdict = Verdict::kEqual;
  const double norm_limit = limits.grad_norm + a.grad_norm_rounding + b.grad_norm_rounding;
  for (const LossPoint& in_a : a.train) {
    const auto in_b = std::lower_bound(b.train.begin(), b.train.end(), in_a.step,
                                       [](const LossPoint& point, int64_t step) { return point.step < step; });
    if (in_b == b.train.end() || in_b->step != in_a.step) continue;
    const int64_t after = std::min(in_a.after, in_b->after);
    const auto mean_a = MeanOver(a, after, in_a.step);
    const auto mean_b = MeanOver(b, after, in_a.step);
    if (!mean_a || !mean_b) continue;
    ComparedRow row{fmt::format("{}", in_a.step), *mean_a, *mean_b, *mean_b - *mean_a, std::nullopt, Verdict::kEqual};
    row.verdict = Judge(row.difference, limits.loss);
    loss.Take(row.difference, row.label);
    if (in_a.grad_norm && in_b->grad_norm) {
      row.grad_norm_difference = *in_b->grad_norm - *in_a.grad_norm;
      norm.Take(*row.grad_norm_difference, row.label);
      if (!(std::abs(*row.grad_norm_difference) <= norm_limit)) {
        row.verdict = Verdict::kDifferent;
        norms_differ = true;
      }
    }
    result.verdict = Worse(result.verdict, row.verdict);
    result.rows.push_back(row);
    ++iterations;
  }
  for (const EvaluationPoint& in_a : a.evaluations) {
    const auto in_b =
        std::find_if(b.evaluations.begin(), b.evaluations.end(), [&](const EvaluationPoint& p) { return p.label == in_a.label; });
    if (in_b == b.evaluations.end()) continue;
    ComparedRow row{in_a.label, in_a.loss, in_b->loss, in_b->loss - in_a.loss, std::nullopt, Verdict::kEqual};
    row.verdict = Judge(row.difference, limits.loss);
    loss.Take(row.difference, row.label);
    result.verdict = Worse(result.verdict, row.verdict);
    result.rows.push_back(row);
  }
  if (iterations == 0) {
    result.verdict = Verdict::kDifferent;
    result.summary = "the two have no iteration in common";
    return result;
  }
  const std::string where = loss.nan ? fmt::format("a loss is NaN first at {}", loss.label)
                                     : fmt::format("largest loss difference {:.2e} at {}", loss.size, loss.label);
  std::string norms;
  if (!norm.label.empty()) {
    norms = norm.nan ? fmt::format(", a gradient norm is NaN first at {}", norm.label)
                     : fmt::format(", largest gradient norm difference {:.1e} at {}", norm.size, norm.label);
    if (norms_differ) norms += fmt::format(" (limit {:.1e})", norm_limit);
  }
  result.summary = fmt::format("{} ({} iterations, tolerance {:.0e}, limit {:.0e}): {}{}", VerdictName(result.verdict),
                               iterations, limits.loss, 2 * limits.loss, where, norms);
  return result;
}

}  // namespace mbridge::mbctl
