// bench without ranks: what is summed up, and what is refused before anything starts. tests/e2e/bench_test.cc runs it.
#include <cmath>
#include <nlohmann/json.hpp>

#include "client/mbctl/bench_run.h"
#include "client/mbctl/bench_summary.h"
#include "client/mbctl/testing/command_fixture.h"

namespace mbridge::mbctl {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<v1::MetricPoint> Points(const std::vector<double>& milliseconds) {
  std::vector<v1::MetricPoint> points;
  for (const double ms : milliseconds) {
    v1::MetricPoint& point = points.emplace_back();
    point.set_step(static_cast<int64_t>(points.size()));
    point.set_elapsed_ms_per_iteration(ms);
    point.set_tokens_per_second(1e6 / ms);
    point.set_tflops_per_rank(2e3 / ms);
    point.set_lm_loss(10 - 0.5 * static_cast<double>(points.size()));
  }
  return points;
}

TEST(BenchSummary, MedianIsTheMiddle) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1, 2}), 2);
  EXPECT_EQ(Median({9, 1, 2, 4}), 3);
}

TEST(BenchSummary, TheFirstIterationsDoNotCount) {
  const auto summary = Summarize(Points({900, 1, 70, 40, 10, 50, 20, 30}), 3);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->iterations, 5);
  EXPECT_EQ(summary->left_out, 3);
  EXPECT_EQ(summary->median_ms, 30);
  EXPECT_EQ(summary->shortest_ms, 10);
  EXPECT_EQ(summary->longest_ms, 50);
  EXPECT_DOUBLE_EQ(summary->tokens_per_second, 1e6 / 30);
  EXPECT_DOUBLE_EQ(summary->tflops_per_rank, 2e3 / 30);
  EXPECT_EQ(summary->last_loss, 6);
  const auto none = Summarize(Points({1, 2, 3}), 3);
  EXPECT_FALSE(none.ok());
  EXPECT_THAT(std::string(none.status().message()), AllOf(HasSubstr("after 3 iterations"), HasSubstr("train.exit_interval")));
}

TEST(BenchSummary, JsonHasWhatTheTextHas) {
  BenchSummary summary = *Summarize(Points({9, 9, 9, 20, 20}), 3);
  summary.recipe = "tiny";
  summary.cuda = true;
  summary.device_name = "NVIDIA H200";
  summary.ranks = 2;
  summary.parameters = 17824;
  summary.planned_bytes = int64_t{3} << 30;
  summary.used_bytes = int64_t{4} << 30;
  EXPECT_EQ(ToJson(summary).dump(),
            R"({"recipe":"tiny","device":"cuda","deviceName":"NVIDIA H200","ranks":2,"parameters":17824,"iterations":2,)"
            R"("leftOut":3,"medianMs":20.0,"shortestMs":20.0,"longestMs":20.0,"tokensPerSecond":50000.0,)"
            R"("tokensPerSecondPerRank":25000.0,"tflopsPerRank":100.0,"memoryPlannedBytes":3221225472,)"
            R"("memoryUsedBytes":4294967296,"lastLoss":7.5})");
  EXPECT_THAT(ToText(summary),
              AllOf(HasSubstr("2 x NVIDIA H200\n"), HasSubstr("2 count, the first 3 do not\n"), HasSubstr("20.0 (median;"),
                    HasSubstr("50000.0 in all, 25000.0 a GPU\n"), HasSubstr("TFLOP/s/GPU       100.0\n"),
                    HasSubstr("3.0 GiB planned, 4.0 GiB of the GPU in use at the end\n"), HasSubstr("7.500000\n")));
}

TEST(BenchSummary, WhatIsNotKnownIsNull) {
  BenchSummary summary = *Summarize(Points({20}), 0);
  summary.last_loss = std::nan("");
  const auto json = ToJson(summary);
  for (const char* name : {"deviceName", "memoryPlannedBytes", "memoryUsedBytes", "lastLoss"}) {
    EXPECT_TRUE(json.at(name).is_null()) << name;
  }
  EXPECT_THAT(ToText(summary),
              AllOf(HasSubstr("1 x CPU\n"), HasSubstr("plan not known\n"), HasSubstr("NaN\n"), Not(HasSubstr(" in all"))));
}

TEST(BenchRanks, EachHasItsGpu) {
  EXPECT_THAT(*DevicesOfRanks(nullptr, 3), ElementsAre("0", "1", "2"));
  EXPECT_THAT(*DevicesOfRanks("5,GPU-8c,7", 2), ElementsAre("5", "GPU-8c"));
  for (const char* few : {"5", ""}) {
    const auto refused = DevicesOfRanks(few, 2);
    ASSERT_FALSE(refused.ok()) << few;
    EXPECT_THAT(DescribeError(refused.status()), AllOf(HasSubstr("--ranks: is 2"), HasSubstr("CUDA_VISIBLE_DEVICES")));
  }
}

TEST_F(Mbctl, BenchRefusesBeforeItStarts) {
  const std::vector<std::string> bench = {"bench", "-r", "vanilla_gpt_pretrain_config", "--device", "cpu"};
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = bench;
    words.insert(words.end(), more.begin(), more.end());
    return Run(words);
  };
  struct Case {
    std::vector<std::string> words;
    const char* text;
  };
  const Case cases[] = {{{"model.hiden_size=64"}, "did you mean model.hidden_size?"},
                        {{"--iters", "4"}, "--iters: Value 4 not in range 5 to 100000"},
                        {{"--iters", "many"}, "--iters"},
                        {{"--ranks", "-1"}, "--ranks"},
                        {{"--device", "tpu"}, "tpu"},
                        {{"-o", "name"}, "-o table, json or yaml"},
                        {{"-c", "no/such.yaml"}, "--config: cannot read no/such.yaml"}};
  for (const auto& [words, text] : cases) {
    const Result result = run(words);
    EXPECT_EQ(result.code, 2) << ::testing::PrintToString(words);
    EXPECT_THAT(result.err, HasSubstr(text)) << ::testing::PrintToString(words);
    EXPECT_EQ(result.out, "");
  }
  EXPECT_THAT(Run({"bench"}).err, HasSubstr("--recipe is required"));
  EXPECT_EQ(Run({"bench", "-r", "vanila_gpt_pretrain_config"}).code, 2);
}

}  // namespace
}  // namespace mbridge::mbctl
