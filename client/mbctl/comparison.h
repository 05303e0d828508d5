// Two loss series side by side: per-iteration difference and a verdict.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/mbctl/loss_series.h"

namespace mbridge::mbctl {

enum class Verdict {
  kEqual,      // Every difference is at most the tolerance.
  kClose,      // None is above twice the tolerance.
  kDifferent,  // One is, or one loss is NaN.
};

struct ComparisonLimits {
  double loss = 1e-4;       // Absolute; mlm_numerics.md: what BF16 rounding leaves after ten iterations.
  double grad_norm = 2e-3;  // Absolute, plus the rounding of printed norms.
};

struct ComparedRow {
  std::string label;  // Iteration, or the name of an evaluation.
  double a = 0, b = 0;
  double difference = 0;  // b - a.
  std::optional<double> grad_norm_difference;
  Verdict verdict = Verdict::kEqual;
};

struct Comparison {
  std::vector<ComparedRow> rows;
  Verdict verdict = Verdict::kDifferent;
  std::string summary;  // One sentence.
};

// Compares the iterations that both have; a series with a coarser log interval is compared with means of the finer one.
// Without a common iteration the verdict is kDifferent and the summary says so.
Comparison Compare(const LossSeries& a, const LossSeries& b, const ComparisonLimits& limits);

// "equal", "close", "DIFFERENT".
std::string VerdictName(Verdict verdict);

}  // namespace mbridge::mbctl
