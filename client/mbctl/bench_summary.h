// What a bench measured, in numbers and as text. Pure functions.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/metric.pb.h"

namespace mbridge::mbctl {

struct BenchSummary {
  // Filled in by Summarize. Medians of the iterations that count, each of its own series.
  int iterations = 0;  // That count.
  int left_out = 0;    // First ones, in which memory, caches and clocks settle.
  double median_ms = 0, shortest_ms = 0, longest_ms = 0;
  double tokens_per_second = 0;  // Of all ranks.
  double tflops_per_rank = 0;    // By Megatron's formula of the model's work.
  double last_loss = 0;          // May be NaN.
  // Facts of the run.
  std::string recipe;
  bool cuda = false;
  std::string device_name;  // Empty: not known.
  int ranks = 1;
  int64_t parameters = 0;
  int64_t planned_bytes = 0;  // Of rank 0; 0: not known, as below.
  int64_t used_bytes = 0;     // cuda: of its GPU at the end; else most resident memory of its process.
};

// The middle of the values; between the two middle ones of an even number. 0 of none.
double Median(std::vector<double> values);

// `points`: one a training iteration, in order. FAILED_PRECONDITION where none is left after the first `left_out`.
absl::StatusOr<BenchSummary> Summarize(const std::vector<v1::MetricPoint>& points, int left_out);

// One object; null for what is not known and for a loss that is not a number.
nlohmann::ordered_json ToJson(const BenchSummary& summary);
// For people, a line a fact.
std::string ToText(const BenchSummary& summary);

}  // namespace mbridge::mbctl
