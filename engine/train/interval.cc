#include "engine/train/interval.h"

#include <cmath>

namespace mbridge {

void IntervalLog::Restart() { begin_ = std::chrono::steady_clock::now(); }

void IntervalLog::Add(const IterationResult& result) {
  ++timed_iterations_;
  if (!std::isfinite(result.lm_loss)) ++sums_->nan;
  if (result.step.updated) {
    sums_->loss_sum += result.lm_loss;
    ++sums_->advanced;
  } else {
    ++sums_->skipped;
  }
  last_ = result;
}

v1::MetricPoint IntervalLog::Finish(int64_t iteration, int64_t consumed_samples, double next_learning_rate) {
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
  const double seconds = elapsed.count() / static_cast<double>(timed_iterations_);
  v1::MetricPoint point;
  point.set_kind(v1::METRIC_KIND_TRAIN);
  point.set_step(iteration);
  point.set_total_steps(plan_->train_iters);
  point.set_lm_loss(sums_->advanced > 0 ? sums_->loss_sum / static_cast<double>(sums_->advanced) : last_.lm_loss);
  point.set_learning_rate(next_learning_rate);
  point.set_grad_norm(last_.step.gradient_norm);
  point.set_loss_scale(last_.step.loss_scale);
  point.set_global_batch_size(plan_->global_batch_size);
  point.set_consumed_samples(consumed_samples);
  point.set_consumed_tokens(consumed_samples * plan_->model.seq_length);
  point.set_elapsed_ms_per_iteration(seconds * 1e3);
  point.set_tokens_per_second(static_cast<double>(plan_->tokens_per_iteration()) / seconds);
  point.set_tflops_per_rank(plan_->flops_per_token * point.tokens_per_second() / plan_->parallel.world() * 1e-12);
  point.set_skipped_iterations(sums_->skipped);
  point.set_nan_iterations(sums_->nan);
  point.set_eta_seconds(seconds * static_cast<double>(plan_->train_iters - iteration));
  if (plan_->log_num_zeros) point.set_num_zeros(last_.step.zero_gradients);
  *sums_ = {};
  timed_iterations_ = 0;
  Restart();
  return point;
}

}  // namespace mbridge
