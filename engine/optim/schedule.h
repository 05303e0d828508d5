// Learning rate and weight decay as functions of the samples consumed. The arithmetic is that of Megatron-LM's
// OptimizerParamScheduler (megatron/core/optimizer_param_scheduler.py) in double, operation by operation.
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mbridge {

enum class LrDecayStyle : uint8_t { kConstant, kLinear, kCosine, kInverseSquareRoot, kWsd };
enum class WsdDecayStyle : uint8_t { kExponential, kLinear, kCosine, kMinusSqrt };
enum class WeightDecayStyle : uint8_t { kConstant, kLinear, kCosine };

// The configuration's spelling ("inverse-square-root", "WSD", "minus_sqrt", …); nullopt for any other.
std::optional<LrDecayStyle> ParseLrDecayStyle(std::string_view text);
std::optional<WsdDecayStyle> ParseWsdDecayStyle(std::string_view text);
std::optional<WeightDecayStyle> ParseWeightDecayStyle(std::string_view text);

// Lengths are in samples: iterations times the global batch size.
struct ScheduleOptions {
  double init_lr = 0;  // scheduler.lr_warmup_init
  double max_lr = 0;   // optimizer.lr
  double min_lr = 0;   // optimizer.min_lr
  int64_t warmup_samples = 0;
  int64_t decay_samples = 0;
  LrDecayStyle lr_style = LrDecayStyle::kLinear;
  int64_t wsd_decay_samples = 0;
  WsdDecayStyle wsd_style = WsdDecayStyle::kExponential;
  double start_weight_decay = 0;
  double end_weight_decay = 0;
  int64_t weight_decay_incr_samples = 0;
  WeightDecayStyle weight_decay_style = WeightDecayStyle::kConstant;
};

struct ScheduleProblem {
  std::string field;  // Name of the configuration key, "optimizer.min_lr".
  std::string description;
};

// What Megatron-LM asserts when it builds its scheduler; empty when all is well.
std::vector<ScheduleProblem> CheckSchedule(const ScheduleOptions& options);

// The rates that the iteration beginning after `samples` consumed samples trains with. The log of an iteration shows the
// learning rate of the next one, LearningRate(options, samples + global_batch_size).
double LearningRate(const ScheduleOptions& options, int64_t samples);
double WeightDecay(const ScheduleOptions& options, int64_t samples);

}  // namespace mbridge
