#include "client/mbctl/bench_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "proto/rpc/status_details.h"
#include "recipes/config/text_form.h"

namespace mbridge::mbctl {
namespace {

std::vector<double> Column(const std::vector<v1::MetricPoint>& points, double (v1::MetricPoint::*value)() const) {
  std::vector<double> column;
  for (const v1::MetricPoint& point : points) column.push_back((point.*value)());
  return column;
}

nlohmann::ordered_json KnownBytes(int64_t bytes) { return bytes > 0 ? nlohmann::ordered_json(bytes) : nlohmann::ordered_json(); }

std::string MemoryText(const BenchSummary& summary) {
  std::string text = summary.planned_bytes > 0 ? recipes::FormatBytes(summary.planned_bytes) + " planned" : "plan not known";
  if (summary.used_bytes == 0) return text;
  text += fmt::format(", {} {}", recipes::FormatBytes(summary.used_bytes),
                      summary.cuda ? "of the GPU in use at the end" : "the most that the process had");
  return text;
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

absl::StatusOr<BenchSummary> Summarize(const std::vector<v1::MetricPoint>& points, int left_out) {
  if (points.size() <= static_cast<size_t>(left_out)) {
    return MakeStatus(
        absl::StatusCode::kFailedPrecondition, v1::REASON_INVALID_REQUEST,
        fmt::format("the training ended after {} iterations, of which the first {} do not count; leave out what ends "
                    "it early (train.exit_interval, train.exit_duration_in_mins)",
                    points.size(), left_out));
  }
  const std::vector<v1::MetricPoint> counted(points.begin() + left_out, points.end());
  const std::vector<double> times = Column(counted, &v1::MetricPoint::elapsed_ms_per_iteration);
  BenchSummary summary;
  summary.iterations = static_cast<int>(counted.size());
  summary.left_out = left_out;
  summary.median_ms = Median(times);
  summary.shortest_ms = *std::min_element(times.begin(), times.end());
  summary.longest_ms = *std::max_element(times.begin(), times.end());
  summary.tokens_per_second = Median(Column(counted, &v1::MetricPoint::tokens_per_second));
  summary.tflops_per_rank = Median(Column(counted, &v1::MetricPoint::tflops_per_rank));
  summary.last_loss = counted.back().lm_loss();
  return summary;
}

nlohmann::ordered_json ToJson(const BenchSummary& summary) {
  using Json = nlohmann::ordered_json;
  return {{"recipe", summary.recipe},
          {"device", summary.cuda ? "cuda" : "cpu"},
          {"deviceName", summary.device_name.empty() ? Json() : Json(summary.device_name)},
          {"ranks", summary.ranks},
          {"parameters", summary.parameters},
          {"iterations", summary.iterations},
          {"leftOut", summary.left_out},
          {"medianMs", summary.median_ms},
          {"shortestMs", summary.shortest_ms},
          {"longestMs", summary.longest_ms},
          {"tokensPerSecond", summary.tokens_per_second},
          {"tokensPerSecondPerRank", summary.tokens_per_second / summary.ranks},
          {"tflopsPerRank", summary.tflops_per_rank},
          {"memoryPlannedBytes", KnownBytes(summary.planned_bytes)},
          {"memoryUsedBytes", KnownBytes(summary.used_bytes)},
          {"lastLoss", std::isfinite(summary.last_loss) ? Json(summary.last_loss) : Json()}};
}

std::string ToText(const BenchSummary& summary) {
  std::string text;
  const auto line = [&text](const std::string& name, const std::string& what) {
    text += fmt::format("{:<16}  {}\n", name, what);
  };
  const char* unit = summary.cuda ? "GPU" : "rank";
  line("recipe", fmt::format("{}, {} parameters", summary.recipe, recipes::FormatCount(static_cast<double>(summary.parameters))));
  line("device",
       fmt::format("{} x {}", summary.ranks, summary.device_name.empty() ? (summary.cuda ? "GPU" : "CPU") : summary.device_name));
  line("iterations", fmt::format("{} count, the first {} do not", summary.iterations, summary.left_out));
  line("ms an iteration",
       fmt::format("{:.1f} (median; {:.1f} to {:.1f})", summary.median_ms, summary.shortest_ms, summary.longest_ms));
  line("tokens/s",
       fmt::format(
           "{:.1f}{}", summary.tokens_per_second,
           summary.ranks == 1 ? "" : fmt::format(" in all, {:.1f} a {}", summary.tokens_per_second / summary.ranks, unit)));
  line(fmt::format("TFLOP/s/{}", unit), fmt::format("{:.{}f}", summary.tflops_per_rank, summary.tflops_per_rank < 1 ? 4 : 1));
  line("memory of rank 0", MemoryText(summary));
  line("last loss", std::isfinite(summary.last_loss) ? fmt::format("{:.6f}", summary.last_loss) : "NaN");
  return text;
}

}  // namespace mbridge::mbctl
