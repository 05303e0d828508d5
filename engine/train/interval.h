// What is averaged between two log lines.
#pragma once

#include <chrono>
#include <cstdint>

#include "engine/optim/optimizer.h"
#include "engine/train/training_plan.h"
#include "mbridge/v1/metric.pb.h"

namespace mbridge {

// The outcome of one iteration, equal on every rank.
struct IterationResult {
  double lm_loss = 0;           // Sum of the token losses of all ranks over their number.
  bool stop_requested = false;  // Some rank was asked to stop.
  StepResult step;
};

// Sums since the last line; part of a checkpoint.
struct IntervalSums {
  double loss_sum = 0;
  int64_t advanced = 0;  // Iterations in loss_sum.
  int64_t skipped = 0;
  int64_t nan = 0;
};

// Not thread-safe. Unlike Megatron-LM's, the first line of a run resets the averages too.
class IntervalLog {
 public:
  // `sums` outlives the log.
  IntervalLog(const TrainingPlan* plan, IntervalSums* sums) : plan_(plan), sums_(sums) { Restart(); }

  // Iterations whose step was skipped stay out of the mean loss, as in Megatron-LM; a NaN loss stays in.
  void Add(const IterationResult& result);
  // The point of a finished interval, without attempt; starts the next interval.
  v1::MetricPoint Finish(int64_t iteration, int64_t consumed_samples, double next_learning_rate);
  // Forgets the time since the last point (evaluation, saving).
  void Restart();

 private:
  const TrainingPlan* plan_;
  std::chrono::steady_clock::time_point begin_;
  IntervalSums* sums_;
  int64_t timed_iterations_ = 0;  // Of this process.
  IterationResult last_;
};

}  // namespace mbridge
