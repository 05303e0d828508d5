#include "client/mbctl/loss_series.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "mbridge/v1/metric.pb.h"

namespace mbridge::mbctl {
namespace {

enum class Writer { kMegatronLm, kBridge, kOwn };

struct LogLine {
  Writer writer;
  int64_t step = 0;
  double loss = 0;
  std::optional<double> grad_norm;
  int64_t bad_iterations = 0;  // Skipped or NaN since the last reset; not part of the mean.
};

double ToNumber(const std::string& text) {
  // strtod reads NaN, NAN, inf and INF as well.
  return std::strtod(text.c_str(), nullptr);
}

std::optional<std::string> Field(const std::string& line, const std::string& name) {
  const size_t begin = line.find("| " + name + ":");
  if (begin == std::string::npos) return std::nullopt;
  const size_t value = line.find_first_not_of(' ', begin + name.size() + 3);
  if (value == std::string::npos) return std::nullopt;
  return line.substr(value, line.find_first_of(" |", value) - value);
}

std::optional<LogLine> ParseTrainingLine(const std::string& line) {
  static const std::regex kStart(R"(\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?\] iteration\s+(\d+)/\s*\d+ \|)",
                                 std::regex::optimize);
  if (line.find("] iteration") == std::string::npos) return std::nullopt;
  std::smatch match;
  if (!std::regex_search(line, match, kStart)) return std::nullopt;
  LogLine parsed;
  parsed.writer = match[1].matched                                ? Writer::kMegatronLm
                  : line.find("| tokens/s:") != std::string::npos ? Writer::kOwn
                                                                  : Writer::kBridge;
  parsed.step = std::stoll(match[2].str());
  const auto loss = Field(line, "lm loss");
  parsed.loss = loss ? ToNumber(*loss) : std::nan("");
  if (const auto norm = Field(line, "grad norm")) parsed.grad_norm = ToNumber(*norm);
  for (const char* name : {"number of skipped iterations", "number of nan iterations"}) {
    if (const auto count = Field(line, name)) parsed.bad_iterations += std::atoll(count->c_str());
  }
  return parsed;
}

std::optional<EvaluationPoint> ParseEvaluationLine(const std::string& line) {
  static const std::regex kPattern(R"(validation loss at iteration (\d+)( on (validation|test) set)? \| lm loss value: (\S+) \|)",
                                   std::regex::optimize);
  if (line.find("validation loss at iteration") == std::string::npos) return std::nullopt;
  std::smatch match;
  if (!std::regex_search(line, match, kPattern)) return std::nullopt;
  const std::string set = match[2].matched ? match[3].str() + " set" : "validation";
  return EvaluationPoint{fmt::format("{} at {}", set, match[1].str()), ToNumber(match[4].str())};
}

// The iteration that a checkpoint was loaded at: the run goes on after it.
std::optional<int64_t> ParseLoadedIteration(const std::string& line) {
  if (line.find("loaded checkpoint") == std::string::npos) return std::nullopt;
  static const std::regex kPattern(R"(at iteration\s+(\d+))");
  std::smatch match;
  if (!std::regex_search(line, match, kPattern)) return std::nullopt;
  return std::stoll(match[1].str());
}

// The first window of a series is as long as the second, where nothing else is known.
void FillFirstWindow(std::vector<LossPoint>* points) {
  if (points->empty()) return;
  const int64_t length = points->size() > 1 ? (*points)[1].step - (*points)[0].step : 1;
  points->front().after = std::max<int64_t>(0, points->front().step - length);
}

std::vector<LossPoint> Sorted(const std::map<int64_t, LossPoint>& by_step) {
  std::vector<LossPoint> points;
  for (const auto& [step, point] : by_step) {
    points.push_back(point);
    if (points.size() > 1) points.back().after = points[points.size() - 2].step;
  }
  FillFirstWindow(&points);
  return points;
}

}  // namespace

absl::StatusOr<LossSeries> ParseLog(const std::string& text, const std::string& name) {
  LossSeries series;
  std::map<int64_t, LossPoint> by_step;
  std::optional<LogLine> previous;  // Within one start of the program.
  bool previous_is_first = false;   // Its accumulators were not reset.
  int64_t loaded = 0;
  Writer writer = Writer::kBridge;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (const auto iteration = ParseLoadedIteration(line)) loaded = *iteration;
    if (const auto evaluation = ParseEvaluationLine(line)) series.evaluations.push_back(*evaluation);
    const auto parsed = ParseTrainingLine(line);
    if (!parsed) continue;
    writer = parsed->writer;
    LossPoint point{parsed->step, 0, parsed->loss, parsed->grad_norm};
    const bool restarted = previous && parsed->step <= previous->step;
    if (writer == Writer::kMegatronLm && previous && !restarted && previous_is_first) {
      const double all = static_cast<double>(parsed->step - previous->step + 1 - parsed->bad_iterations);
      const double first = static_cast<double>(1 - std::min<int64_t>(1, previous->bad_iterations));
      // The accumulator still holds iteration `previous->step`; take its share out.
      if (first > 0 && all > first) point.loss = (all * parsed->loss - first * previous->loss) / (all - first);
      series.notes.push_back(fmt::format("line of iteration {}: mean of iterations {}..{} as printed, turned back", parsed->step,
                                         previous->step, parsed->step));
    }
    previous_is_first = (!previous || restarted) && parsed->step == loaded + 1;
    if (restarted) {
      // What the earlier start had beyond this step is replaced as its lines come.
      series.notes.push_back(fmt::format("the log starts again at iteration {}; the later lines count", parsed->step));
      by_step.erase(by_step.lower_bound(parsed->step), by_step.end());
    }
    by_step[parsed->step] = point;
    previous = parsed;
  }
  if (by_step.empty()) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: no line of the form ` [YYYY-MM-DD HH:MM:SS] iteration        1/      10 | ... | lm loss: ...`; is it the "
        "log of the last rank?",
        name));
  }
  const char* who = writer == Writer::kMegatronLm ? "Megatron-LM log" : writer == Writer::kBridge ? "Megatron-Bridge log" : "log";
  series.source = fmt::format("{} {}", who, name);
  series.train = Sorted(by_step);
  // Megatron-LM always prints the first iteration, alone.
  if (writer == Writer::kMegatronLm) series.train.front().after = series.train.front().step - 1;
  series.grad_norm_rounding = 5e-4;
  return series;
}

absl::StatusOr<LossSeries> ParseLosses(const std::string& json, const std::string& run, const std::string& name) {
  const auto root = nlohmann::json::parse(json, nullptr, false);
  if (root.is_discarded() || !root.is_object() || !root.contains("runs") || !root["runs"].is_object()) {
    return absl::InvalidArgumentError(fmt::format("{}: not a losses file (JSON with \"runs\")", name));
  }
  if (!root["runs"].contains(run)) {
    std::string known;
    for (const auto& [key, value] : root["runs"].items()) known += (known.empty() ? "" : ", ") + key;
    return absl::InvalidArgumentError(fmt::format("{} has no run '{}'; write {}:RUN with one of {}", name, run, name, known));
  }
  const auto& entry = root["runs"][run];
  LossSeries series;
  series.source = fmt::format("Megatron-LM run {} of {}", run, name);
  const auto number = [](const nlohmann::json& value) { return value.is_number() ? value.get<double>() : std::nan(""); };
  const auto losses = entry.value("lm_loss", nlohmann::json::array());
  const auto norms = entry.value("grad_norm", nlohmann::json::array());
  for (size_t i = 0; i < losses.size(); ++i) {
    LossPoint point{static_cast<int64_t>(i) + 1, static_cast<int64_t>(i), number(losses[i]), std::nullopt};
    if (i < norms.size()) point.grad_norm = number(norms[i]);
    series.train.push_back(point);
  }
  const auto step = series.train.size();
  const auto validation = entry.value("validation_after_10", nlohmann::json::array());
  if (!validation.empty()) series.evaluations.push_back({fmt::format("validation at {}", step), number(validation[0])});
  if (validation.size() > 1) {
    series.evaluations.push_back({fmt::format("validation set at {}", step), number(validation[1])});
  }
  if (entry.contains("test")) series.evaluations.push_back({fmt::format("test set at {}", step), number(entry["test"])});
  const std::string digits = entry.value("digits", "");
  if (digits.find("printed") != std::string::npos) series.grad_norm_rounding = 5e-4;
  return series;
}

LossSeries FromPoints(const std::vector<v1::MetricPoint>& points, const std::string& name) {
  LossSeries series;
  series.source = name;
  std::map<int64_t, LossPoint> by_step;
  for (const v1::MetricPoint& point : points) {
    if (point.kind() == v1::METRIC_KIND_TRAIN) {
      by_step[point.step()] = {point.step(), 0, point.lm_loss(), point.grad_norm()};
      continue;
    }
    const char* set = point.kind() == v1::METRIC_KIND_TEST ? "test set" : point.final_pass() ? "validation set" : "validation";
    series.evaluations.push_back({fmt::format("{} at {}", set, point.step()), point.lm_loss()});
  }
  series.train = Sorted(by_step);
  return series;
}

std::optional<double> MeanOver(const LossSeries& series, int64_t after, int64_t step) {
  double sum = 0;
  int64_t reached = after;
  auto point = std::upper_bound(series.train.begin(), series.train.end(), after,
                                [](int64_t value, const LossPoint& other) { return value < other.step; });
  for (; point != series.train.end() && point->after == reached && point->step <= step; ++point) {
    sum += point->loss * static_cast<double>(point->step - point->after);
    reached = point->step;
    if (reached == step) return sum / static_cast<double>(step - after);
  }
  return std::nullopt;
}

}  // namespace mbridge::mbctl
