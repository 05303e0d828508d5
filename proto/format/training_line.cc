#include "proto/format/training_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "mbridge/v1/metric.pb.h"

namespace mbridge {
namespace {

std::string Number(double value, const char* format) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Inf" : "-Inf";
  return fmt::format(fmt::runtime(format), value);
}

std::string TimeStamp(const v1::MetricPoint& point, bool utc) {
  const std::time_t seconds = static_cast<std::time_t>(point.time().seconds());
  std::tm parts{};
  if (utc) {
    gmtime_r(&seconds, &parts);
  } else {
    localtime_r(&seconds, &parts);
  }
  char text[32];
  const size_t length = std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts);
  return std::string(text, length);
}

}  // namespace

std::string FormatTrainingLine(const v1::MetricPoint& point, const TrainingLineOptions& options) {
  std::string line = fmt::format(" [{}] iteration {:8d}/{:8d} | consumed samples: {:12d} | ", TimeStamp(point, options.utc),
                                 point.step(), point.total_steps(), point.consumed_samples());
  line += fmt::format("elapsed time per iteration (ms): {} | ", Number(point.elapsed_ms_per_iteration(), "{:.1f}"));
  if (options.throughput) {
    line += fmt::format("throughput per GPU (TFLOP/s/GPU): {} | ", Number(point.tflops_per_rank(), "{:.1f}"));
  }
  line += fmt::format("learning rate: {} | global batch size: {:5d} | lm loss: {} | loss scale: {} | grad norm: {} | ",
                      Number(point.learning_rate(), "{:.6E}"), point.global_batch_size(), Number(point.lm_loss(), "{:.6E}"),
                      Number(point.loss_scale(), "{:.1f}"), Number(point.grad_norm(), "{:.3f}"));
  if (point.has_num_zeros()) line += fmt::format("num zeros: {} | ", point.num_zeros());
  if (point.has_params_norm()) line += fmt::format("params norm: {} | ", Number(point.params_norm(), "{:.3f}"));
  line += fmt::format("number of skipped iterations: {:3d} | number of nan iterations: {:3d} |", point.skipped_iterations(),
                      point.nan_iterations());
  if (options.speed_and_eta) {
    line += fmt::format(" tokens/s: {} | ETA: {} |", Number(point.tokens_per_second(), "{:.1f}"),
                        FormatDuration(point.eta_seconds()));
  }
  return line;
}

std::string FormatValidationLines(const v1::MetricPoint& point) {
  const char* where = "";
  if (point.kind() == v1::METRIC_KIND_TEST) {
    where = " on test set";
  } else if (point.final_pass()) {
    where = " on validation set";
  }
  const double loss = point.lm_loss();
  // std::min(20, NaN) is 20, which would hide the NaN.
  const double perplexity = std::isnan(loss) ? loss : std::exp(std::min(20.0, loss));
  const std::string text = fmt::format(" validation loss at iteration {}{} | lm loss value: {} | lm loss PPL: {} | ",
                                       point.step(), where, Number(loss, "{:.6E}"), Number(perplexity, "{:.6E}"));
  const std::string dashes(text.size() + 1, '-');
  return fmt::format("{}\n{}\n{}", dashes, text, dashes);
}

std::string FormatPoint(const v1::MetricPoint& point, const TrainingLineOptions& options) {
  const bool evaluation = point.kind() == v1::METRIC_KIND_VALIDATION || point.kind() == v1::METRIC_KIND_TEST;
  return evaluation ? FormatValidationLines(point) : FormatTrainingLine(point, options);
}

std::string FormatDuration(double seconds) {
  if (!(seconds >= 0) || std::isinf(seconds)) return "-";
  const auto total = static_cast<long long>(std::llround(seconds));
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m{:02d}s", total / 60, total % 60);
  if (total < 86400) return fmt::format("{}h{:02d}m", total / 3600, total / 60 % 60);
  return fmt::format("{}d{:02d}h", total / 86400, total / 3600 % 24);
}

}  // namespace mbridge
