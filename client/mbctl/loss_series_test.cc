#include "client/mbctl/loss_series.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "client/mbctl/comparison.h"
#include "mbridge/v1/metric.pb.h"
#include "proto/format/training_line.h"

namespace mbridge::mbctl {
namespace {

std::string MegatronLine(int step, const std::string& loss, const std::string& norm = "0.640") {
  char text[512];
  std::snprintf(text, sizeof(text),
                " [2026-11-30 00:30:31.720768] iteration %8d/      10 | consumed samples: %12d | elapsed time per iteration "
                "(ms): 142.7 | learning rate: 2.190000E-04 | global batch size:    32 | lm loss: %s | loss scale: 1.0 | grad "
                "norm: %s | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
                step, 32 * step, loss.c_str(), norm.c_str());
  return text;
}

// Run A of the oracle as Megatron-LM printed it: the second line is the mean of two.
std::string OracleLog() {
  return MegatronLine(1, "1.042071E+01", "0.651") + MegatronLine(2, "1.035622E+01", "0.711") +
         " [Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 |\n" + MegatronLine(3, "1.016689E+01", "0.640") +
         "------------------------------\n"
         " validation loss at iteration 10 | lm loss value: 9.592936E+00 | lm loss PPL: 1.466084E+04 | \n"
         "------------------------------\n"
         " validation loss at iteration 10 on validation set | lm loss value: 9.592752E+00 | lm loss PPL: 1.46E+04 | \n"
         " validation loss at iteration 10 on test set | lm loss value: 9.626372E+00 | lm loss PPL: 1.5E+04 | \n";
}

std::string Oracle() {
  std::ifstream file(std::string(MB_SOURCE_DIR) + "/tests/data/mlm/losses.json");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(ParseLog, MegatronLmsSecondLineIsTurnedBack) {
  const auto series = ParseLog(OracleLog(), "run.log");
  ASSERT_TRUE(series.ok()) << series.status();
  EXPECT_EQ(series->source, "Megatron-LM log run.log");
  ASSERT_EQ(series->train.size(), 3u);
  EXPECT_NEAR(series->train[0].loss, 10.42071, 1e-9);
  EXPECT_NEAR(series->train[1].loss, 10.291720390319824, 1.5e-5);  // Exact value of the oracle.
  EXPECT_NEAR(series->train[2].loss, 10.16689, 1e-9);
  EXPECT_EQ(series->train[1].after, 1);
  EXPECT_EQ(*series->train[1].grad_norm, 0.711);
  ASSERT_EQ(series->evaluations.size(), 3u);
  EXPECT_EQ(series->evaluations[0].label, "validation at 10");
  EXPECT_EQ(series->evaluations[1].label, "validation set at 10");
  EXPECT_EQ(series->evaluations[2].label, "test set at 10");
  EXPECT_EQ(series->evaluations[2].loss, 9.626372);
  EXPECT_EQ(series->notes.size(), 1u);
}

TEST(ParseLog, LogIntervalTen) {
  // Lines 1, 10, 20: line 10 holds iterations 1..10, so what is left is 2..10.
  const auto series = ParseLog(MegatronLine(1, "1.0E+01") + MegatronLine(10, "9.1E+00") + MegatronLine(20, "8.0E+00"), "x");
  ASSERT_TRUE(series.ok());
  EXPECT_NEAR(series->train[1].loss, (10 * 9.1 - 10.0) / 9, 1e-12);
  EXPECT_EQ(series->train[1].after, 1);
  EXPECT_EQ(series->train[2].loss, 8.0);
  EXPECT_EQ(series->train[2].after, 10);
}

TEST(ParseLog, ATailOfALogIsTakenAsPrinted) {
  const auto series = ParseLog(MegatronLine(7, "9.8E+00") + MegatronLine(8, "9.7E+00"), "x");
  ASSERT_TRUE(series.ok());
  EXPECT_EQ(series->train[1].loss, 9.7);
}

TEST(ParseLog, AResumedRunAveragesItsSecondLineToo) {
  const auto series = ParseLog("  successfully loaded checkpoint from /c [ t 1/1, p 1/1 ] at iteration 5\n" +
                                   MegatronLine(6, "9.0E+00") + MegatronLine(7, "8.9E+00"),
                               "x");
  ASSERT_TRUE(series.ok());
  EXPECT_NEAR(series->train[1].loss, 8.8, 1e-12);
}

TEST(ParseLog, LaterLinesOfARepeatedStepCount) {
  const auto series = ParseLog(MegatronLine(1, "1.0E+01") + MegatronLine(2, "9.9E+00") + MegatronLine(3, "9.5E+00") +
                                   MegatronLine(1, "1.1E+01") + MegatronLine(2, "1.05E+01"),
                               "x");
  ASSERT_TRUE(series.ok());
  ASSERT_EQ(series->train.size(), 2u);
  EXPECT_EQ(series->train[0].loss, 11.0);
  EXPECT_NEAR(series->train[1].loss, 10.0, 1e-12);
}

TEST(ParseLog, BridgeLinesAreNotAveraged) {
  // Bridge's fields and time stamp; a prefix as Slurm's `srun -l` writes it.
  const std::string line =
      "3: [2026-11-30 00:30:31] iteration        1/      10 | consumed samples:           32 | elapsed time per iteration "
      "(ms): 3738.6 | learning rate: 6.000000E-05 | global batch size:    32 | lm loss: 7.968678E+00 | load_balancing_loss: "
      "1.329517E+00 | mtp_1 loss: 7.925096E+00 | loss scale: 1.0 | grad norm: 1.040 | number of skipped iterations:   0 | "
      "number of nan iterations:   0 |\n";
  std::string second = line;
  second.replace(second.find("        1/"), 10, "        2/");
  const auto series = ParseLog(line + second, "b.log");
  ASSERT_TRUE(series.ok()) << series.status();
  EXPECT_EQ(series->source, "Megatron-Bridge log b.log");
  ASSERT_EQ(series->train.size(), 2u);
  EXPECT_EQ(series->train[1].loss, 7.968678);
  EXPECT_EQ(*series->train[1].grad_norm, 1.040);
}

TEST(ParseLog, ALineWithoutLossIsNan) {
  // Both frameworks leave a NaN loss out of the line.
  std::string line = MegatronLine(1, "X");
  line.erase(line.find("lm loss: X | "), 13);
  const auto series = ParseLog(line, "x");
  ASSERT_TRUE(series.ok());
  EXPECT_TRUE(std::isnan(series->train[0].loss));
}

TEST(ParseLog, ReadsOurOwnLines) {
  std::string text;
  for (int step = 1; step <= 2; ++step) {
    v1::MetricPoint point;
    point.set_kind(v1::METRIC_KIND_TRAIN);
    point.set_step(step);
    point.set_total_steps(10);
    point.set_lm_loss(step == 1 ? 10.5 : std::nan(""));
    point.set_grad_norm(0.5);
    text += FormatPoint(point) + "\n";
  }
  v1::MetricPoint validation;
  validation.set_kind(v1::METRIC_KIND_VALIDATION);
  validation.set_step(2);
  validation.set_lm_loss(9.5);
  text += FormatPoint(validation) + "\n";
  const auto series = ParseLog(text, "rank-0.log");
  ASSERT_TRUE(series.ok()) << series.status();
  EXPECT_EQ(series->source, "log rank-0.log");
  EXPECT_EQ(series->train[0].loss, 10.5);
  EXPECT_TRUE(std::isnan(series->train[1].loss));
  ASSERT_EQ(series->evaluations.size(), 1u);
  EXPECT_EQ(series->evaluations[0].loss, 9.5);
}

TEST(ParseLog, OtherTextIsAnError) {
  const auto series = ParseLog("hello\n", "notes.txt");
  EXPECT_EQ(series.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(series.status().message()).find("notes.txt"), std::string::npos);
}

TEST(ParseLosses, ReadsARunAndListsThem) {
  const auto series = ParseLosses(Oracle(), "seed1_default_dropout", "losses.json");
  ASSERT_TRUE(series.ok()) << series.status();
  ASSERT_EQ(series->train.size(), 10u);
  EXPECT_NEAR(series->train[1].loss, 10.291720390319824, 1e-9);
  EXPECT_EQ(series->evaluations.size(), 3u);
  const auto unknown = ParseLosses(Oracle(), "", "losses.json");
  EXPECT_NE(std::string(unknown.status().message()).find("seed1_dp2"), std::string::npos);
  EXPECT_FALSE(ParseLosses("[1]", "x", "y").ok());
}

TEST(Compare, TheOraclesLogEqualsTheOracle) {
  const auto log = ParseLog(OracleLog(), "run.log");
  const auto oracle = ParseLosses(Oracle(), "seed1_default_dropout", "losses.json");
  ASSERT_TRUE(log.ok() && oracle.ok());
  const Comparison comparison = Compare(*log, *oracle, {});
  EXPECT_EQ(comparison.verdict, Verdict::kEqual) << comparison.summary;
  EXPECT_EQ(comparison.rows.size(), 6u);  // Three iterations, two validations, one test.
}

LossSeries Series(std::vector<double> losses, double norm = 0.5) {
  LossSeries series;
  for (size_t i = 0; i < losses.size(); ++i) {
    series.train.push_back({static_cast<int64_t>(i) + 1, static_cast<int64_t>(i), losses[i], norm});
  }
  return series;
}

TEST(Compare, Thresholds) {
  const LossSeries base = Series({10, 9, 8});
  EXPECT_EQ(Compare(base, Series({10, 9.00009, 8}), {}).verdict, Verdict::kEqual);
  EXPECT_EQ(Compare(base, Series({10, 9.00015, 8}), {}).verdict, Verdict::kClose);
  const Comparison far = Compare(base, Series({10, 9.00021, 8}), {});
  EXPECT_EQ(far.verdict, Verdict::kDifferent);
  EXPECT_EQ(far.rows[1].verdict, Verdict::kDifferent);
  EXPECT_EQ(far.rows[0].verdict, Verdict::kEqual);
  EXPECT_NE(far.summary.find("2.10e-04 at 2"), std::string::npos) << far.summary;
  EXPECT_EQ(Compare(base, Series({10, 9.00021, 8}), {.loss = 1e-3}).verdict, Verdict::kEqual);
}

TEST(Compare, GradientNormsCount) {
  const Comparison comparison = Compare(Series({10}, 0.5), Series({10}, 0.51), {});
  EXPECT_EQ(comparison.verdict, Verdict::kDifferent);
  EXPECT_NE(comparison.summary.find("gradient norm"), std::string::npos);
}

TEST(Compare, NanIsNeverEqual) {
  EXPECT_EQ(Compare(Series({10, std::nan("")}), Series({10, std::nan("")}), {}).verdict, Verdict::kDifferent);
}

TEST(Compare, NothingInCommonIsNotEqual) { EXPECT_EQ(Compare(Series({}), Series({1}), {}).verdict, Verdict::kDifferent); }

TEST(Compare, CoarserSeriesAgainstMeansOfTheFiner) {
  LossSeries coarse;
  coarse.train = {{2, 0, 9.5, 0.5}, {4, 2, 7.5, 0.5}};
  const Comparison comparison = Compare(Series({10, 9, 8, 7}), coarse, {});
  EXPECT_EQ(comparison.rows.size(), 2u);
  EXPECT_EQ(comparison.verdict, Verdict::kEqual) << comparison.summary;
}

TEST(FromPoints, KeepsTheNewestOfAStep) {
  std::vector<v1::MetricPoint> points(3);
  for (int i = 0; i < 3; ++i) {
    points[i].set_kind(v1::METRIC_KIND_TRAIN);
    points[i].set_step(i == 2 ? 2 : i + 1);
    points[i].set_lm_loss(i);
  }
  const LossSeries series = FromPoints(points, "job");
  ASSERT_EQ(series.train.size(), 2u);
  EXPECT_EQ(series.train[1].loss, 2);
  EXPECT_EQ(series.train[0].after, 0);
}

}  // namespace
}  // namespace mbridge::mbctl
