#include "engine/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

namespace mbridge {

std::optional<LrDecayStyle> ParseLrDecayStyle(std::string_view text) {
  if (text == "constant") return LrDecayStyle::kConstant;
  if (text == "linear") return LrDecayStyle::kLinear;
  if (text == "cosine") return LrDecayStyle::kCosine;
  if (text == "inverse-square-root") return LrDecayStyle::kInverseSquareRoot;
  if (text == "WSD") return LrDecayStyle::kWsd;
  return std::nullopt;
}

std::optional<WsdDecayStyle> ParseWsdDecayStyle(std::string_view text) {
  if (text == "exponential") return WsdDecayStyle::kExponential;
  if (text == "linear") return WsdDecayStyle::kLinear;
  if (text == "cosine") return WsdDecayStyle::kCosine;
  if (text == "minus_sqrt") return WsdDecayStyle::kMinusSqrt;
  return std::nullopt;
}

std::optional<WeightDecayStyle> ParseWeightDecayStyle(std::string_view text) {
  if (text == "constant") return WeightDecayStyle::kConstant;
  if (text == "linear") return WeightDecayStyle::kLinear;
  if (text == "cosine") return WeightDecayStyle::kCosine;
  return std::nullopt;
}

std::vector<ScheduleProblem> CheckSchedule(const ScheduleOptions& o) {
  std::vector<ScheduleProblem> problems;
  const auto require = [&](bool good, std::string field, std::string description) {
    if (!good) problems.push_back({std::move(field), std::move(description)});
  };
  require(o.min_lr >= 0, "optimizer.min_lr", fmt::format("{} is negative; allowed is 0 to optimizer.lr", o.min_lr));
  require(o.max_lr >= o.min_lr, "optimizer.min_lr",
          fmt::format("{} is above optimizer.lr = {}; lower it or raise optimizer.lr", o.min_lr, o.max_lr));
  require(o.init_lr <= o.max_lr, "scheduler.lr_warmup_init", fmt::format("{} is above optimizer.lr = {}", o.init_lr, o.max_lr));
  require(o.decay_samples > 0, "scheduler.lr_decay_iters",
          fmt::format("the decay lasts {} samples; at least 1 is needed", o.decay_samples));
  require(o.warmup_samples >= 0, "scheduler.lr_warmup_iters",
          fmt::format("the warm-up lasts {} samples; at least 0", o.warmup_samples));
  require(
      o.warmup_samples < o.decay_samples, "scheduler.lr_warmup_iters",
      fmt::format(
          "the warm-up of {} samples does not end before the decay, at {} samples; shorten it or raise scheduler.lr_decay_iters",
          o.warmup_samples, o.decay_samples));
  if (o.lr_style == LrDecayStyle::kWsd) {
    require(o.wsd_decay_samples > 0, "scheduler.lr_wsd_decay_iters",
            "the WSD schedule needs the length of its decay, at least 1 iteration");
  }
  require(o.start_weight_decay >= 0, "scheduler.start_weight_decay", fmt::format("{} is negative", o.start_weight_decay));
  require(o.end_weight_decay >= o.start_weight_decay, "scheduler.end_weight_decay",
          fmt::format("{} is below scheduler.start_weight_decay = {}", o.end_weight_decay, o.start_weight_decay));
  if (o.weight_decay_style == WeightDecayStyle::kConstant) {
    require(o.start_weight_decay == o.end_weight_decay, "scheduler.weight_decay_incr_style",
            fmt::format("constant, but the weight decay goes from {} to {}; use linear or cosine", o.start_weight_decay,
                        o.end_weight_decay));
  } else {
    require(o.weight_decay_incr_samples > 0, "scheduler.weight_decay_incr_style", "the increase needs at least 1 sample");
  }
  return problems;
}

namespace {

double WsdCoefficient(const ScheduleOptions& o, int64_t samples) {
  const int64_t anneal_start = o.decay_samples - o.wsd_decay_samples;
  if (samples <= anneal_start) return 1.0;
  const double ratio = static_cast<double>(samples - anneal_start) / static_cast<double>(o.wsd_decay_samples);
  switch (o.wsd_style) {
    case WsdDecayStyle::kLinear: return 1.0 - ratio;
    case WsdDecayStyle::kCosine: return 0.5 * (std::cos(std::numbers::pi * ratio) + 1.0);
    case WsdDecayStyle::kExponential: return 2.0 * std::pow(0.5, ratio) - 1.0;
    case WsdDecayStyle::kMinusSqrt: return 1.0 - std::sqrt(ratio);
  }
  return 1.0;
}

}  // namespace

double LearningRate(const ScheduleOptions& o, int64_t samples) {
  if (o.warmup_samples > 0 && samples <= o.warmup_samples) {
    return o.init_lr + (o.max_lr - o.init_lr) * static_cast<double>(samples) / static_cast<double>(o.warmup_samples);
  }
  if (o.lr_style == LrDecayStyle::kConstant) return o.max_lr;
  if (samples > o.decay_samples) return o.min_lr;
  if (o.lr_style == LrDecayStyle::kInverseSquareRoot) {
    const double warmup = static_cast<double>(std::max<int64_t>(o.warmup_samples, 1));
    const double now = static_cast<double>(std::max<int64_t>(samples, 1));
    return std::max(o.min_lr, o.max_lr * std::pow(warmup, 0.5) / std::pow(now, 0.5));
  }
  double coefficient = 1.0;
  const double ratio = static_cast<double>(samples - o.warmup_samples) / static_cast<double>(o.decay_samples - o.warmup_samples);
  if (o.lr_style == LrDecayStyle::kLinear) coefficient = 1.0 - ratio;
  if (o.lr_style == LrDecayStyle::kCosine) coefficient = 0.5 * (std::cos(std::numbers::pi * ratio) + 1.0);
  if (o.lr_style == LrDecayStyle::kWsd) coefficient = WsdCoefficient(o, samples);
  return o.min_lr + coefficient * (o.max_lr - o.min_lr);
}

double WeightDecay(const ScheduleOptions& o, int64_t samples) {
  if (samples > o.weight_decay_incr_samples || o.weight_decay_style == WeightDecayStyle::kConstant) return o.end_weight_decay;
  const double ratio = static_cast<double>(samples) / static_cast<double>(o.weight_decay_incr_samples);
  const double coefficient =
      o.weight_decay_style == WeightDecayStyle::kLinear ? ratio : 0.5 * (std::cos(std::numbers::pi * (1 - ratio)) + 1.0);
  return o.start_weight_decay + coefficient * (o.end_weight_decay - o.start_weight_decay);
}

}  // namespace mbridge
