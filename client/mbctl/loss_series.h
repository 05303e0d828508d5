// The losses of one run, whatever wrote them down: a job, a Megatron-LM or Megatron-Bridge log, the oracle's losses.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace mbridge::v1 {
class MetricPoint;
}

namespace mbridge::mbctl {

struct LossPoint {
  int64_t step = 0;
  int64_t after = 0;                // The loss is the mean over iterations after + 1 .. step.
  double loss = 0;                  // NaN stays NaN.
  std::optional<double> grad_norm;  // Of iteration `step`.
};

struct EvaluationPoint {
  std::string label;  // "validation at 10", "validation set at 10", "test set at 10".
  double loss = 0;
};

struct LossSeries {
  std::string source;            // For people: "Megatron-LM log run.txt".
  std::vector<LossPoint> train;  // By step, ascending; of a repeated step the later one.
  std::vector<EvaluationPoint> evaluations;
  std::vector<std::string> notes;  // What was changed while reading.
  double grad_norm_rounding = 0;   // Half of the last printed digit.
};

// Text with Megatron's console lines. Time stamps with microseconds are Megatron-LM's, whole seconds Megatron-Bridge's,
// and lines that have tokens/s are this system's. Megatron-LM does not reset its accumulators after the first line of a
// run, so its second line is the mean of all iterations up to there; it is turned back into the mean after the first
// line (l2 = 2*printed2 - printed1 at log interval 1). A line without lm loss is NaN: both leave it out then.
// INVALID_ARGUMENT when there is no such line.
absl::StatusOr<LossSeries> ParseLog(const std::string& text, const std::string& name);

// One run of the oracle file (tests/data/mlm/losses.json); an unknown or empty `run` lists the runs.
absl::StatusOr<LossSeries> ParseLosses(const std::string& json, const std::string& run, const std::string& name);

LossSeries FromPoints(const std::vector<v1::MetricPoint>& points, const std::string& name);

// The mean loss over iterations after + 1 .. step where the series' points tile exactly that window.
std::optional<double> MeanOver(const LossSeries& series, int64_t after, int64_t step);

}  // namespace mbridge::mbctl
