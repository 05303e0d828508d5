#include "proto/format/training_line.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "mbridge/v1/metric.pb.h"

namespace mbridge {
namespace {

// The example line of a real Megatron-LM run: 2026-11-30 00:30:31 UTC.
v1::MetricPoint RealPoint() {
  v1::MetricPoint point;
  point.set_kind(v1::METRIC_KIND_TRAIN);
  point.mutable_time()->set_seconds(1795998631);
  point.set_step(3);
  point.set_total_steps(10);
  point.set_consumed_samples(96);
  point.set_elapsed_ms_per_iteration(142.7);
  point.set_learning_rate(2.19e-4);
  point.set_global_batch_size(32);
  point.set_lm_loss(10.16689);
  point.set_loss_scale(1);
  point.set_grad_norm(0.640);
  point.set_tokens_per_second(114810.25);
  point.set_eta_seconds(7 * 0.1427);
  return point;
}

TEST(TrainingLine, EqualsMegatronLmCharacterByCharacter) {
  TrainingLineOptions options;
  options.utc = true;
  options.speed_and_eta = false;
  EXPECT_EQ(FormatTrainingLine(RealPoint(), options),
            " [2026-11-30 00:30:31] iteration        3/      10 | consumed samples:           96 | elapsed time per iteration "
            "(ms): 142.7 | learning rate: 2.190000E-04 | global batch size:    32 | lm loss: 1.016689E+01 | loss scale: 1.0 "
            "| grad norm: 0.640 | number of skipped iterations:   0 | number of nan iterations:   0 |");
}

TEST(TrainingLine, AddsSpeedAndEtaAtTheEnd) {
  const std::string line = FormatTrainingLine(RealPoint());
  EXPECT_TRUE(line.ends_with("number of nan iterations:   0 | tokens/s: 114810.2 | ETA: 1s |")) << line;
}

TEST(TrainingLine, ShowsOptionalFieldsInMegatronsOrder) {
  v1::MetricPoint point = RealPoint();
  point.set_num_zeros(17);
  point.set_params_norm(12.3456);
  point.set_tflops_per_rank(456.71);
  TrainingLineOptions options;
  options.throughput = true;
  const std::string line = FormatTrainingLine(point, options);
  EXPECT_NE(line.find("(ms): 142.7 | throughput per GPU (TFLOP/s/GPU): 456.7 | learning rate"), std::string::npos) << line;
  EXPECT_NE(line.find("grad norm: 0.640 | num zeros: 17 | params norm: 12.346 | number of skipped"), std::string::npos) << line;
}

TEST(TrainingLine, PrintsNanAndInfinityInsteadOfHidingThem) {
  v1::MetricPoint point = RealPoint();
  point.set_lm_loss(std::numeric_limits<double>::quiet_NaN());
  point.set_grad_norm(std::numeric_limits<double>::infinity());
  point.set_nan_iterations(1);
  const std::string line = FormatTrainingLine(point);
  EXPECT_NE(line.find("lm loss: NaN | loss scale: 1.0 | grad norm: Inf |"), std::string::npos) << line;
  EXPECT_NE(line.find("number of nan iterations:   1 |"), std::string::npos) << line;
}

TEST(ValidationLines, EqualMegatronLm) {
  v1::MetricPoint point;
  point.set_kind(v1::METRIC_KIND_VALIDATION);
  point.set_step(10);
  point.set_lm_loss(9.592936);
  // PPL of the real line comes from the unrounded loss; 9.592936 gives 1.466085E+04.
  const std::string dashes(94, '-');
  EXPECT_EQ(
      FormatValidationLines(point),
      dashes + "\n validation loss at iteration 10 | lm loss value: 9.592936E+00 | lm loss PPL: 1.466085E+04 | \n" + dashes);
}

TEST(ValidationLines, NameTheSetOfTheFinalPasses) {
  v1::MetricPoint point;
  point.set_kind(v1::METRIC_KIND_VALIDATION);
  point.set_step(10);
  point.set_final_pass(true);
  EXPECT_NE(FormatPoint(point).find(" validation loss at iteration 10 on validation set | lm loss value"), std::string::npos);
  point.set_kind(v1::METRIC_KIND_TEST);
  EXPECT_NE(FormatPoint(point).find(" validation loss at iteration 10 on test set | lm loss value"), std::string::npos);
}

TEST(ValidationLines, CapPerplexityAndKeepNan) {
  v1::MetricPoint point;
  point.set_kind(v1::METRIC_KIND_VALIDATION);
  point.set_lm_loss(25);
  EXPECT_NE(FormatPoint(point).find("PPL: 4.851652E+08"), std::string::npos);
  point.set_lm_loss(std::nan(""));
  EXPECT_NE(FormatPoint(point).find("lm loss value: NaN | lm loss PPL: NaN | "), std::string::npos);
}

TEST(Duration, UsesTwoUnits) {
  EXPECT_EQ(FormatDuration(0.4), "0s");
  EXPECT_EQ(FormatDuration(59.6), "1m00s");
  EXPECT_EQ(FormatDuration(185), "3m05s");
  EXPECT_EQ(FormatDuration(7620), "2h07m");
  EXPECT_EQ(FormatDuration(3 * 86400 + 4 * 3600 + 60), "3d04h");
  EXPECT_EQ(FormatDuration(-1), "-");
  EXPECT_EQ(FormatDuration(std::nan("")), "-");
}

}  // namespace
}  // namespace mbridge
