#include "engine/optim/schedule.h"

#include <cmath>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

// 10 iterations of 32 samples.
ScheduleOptions Base(LrDecayStyle style, int64_t warmup = 0) {
  return {.init_lr = 0,
          .max_lr = 3e-4,
          .min_lr = 3e-5,
          .warmup_samples = warmup,
          .decay_samples = 320,
          .lr_style = style,
          .start_weight_decay = 0.01,
          .end_weight_decay = 0.01,
          .weight_decay_incr_samples = 320};
}

struct Point {
  int64_t samples;
  double lr;
};

void ExpectTable(const ScheduleOptions& options, const std::vector<Point>& table) {
  EXPECT_THAT(CheckSchedule(options), testing::IsEmpty());
  for (const Point& point : table)
    EXPECT_NEAR(LearningRate(options, point.samples), point.lr, 1e-15 * 3e-4 + 1e-19) << point.samples;
}

TEST(LearningRate, LinearWithoutWarmup) {
  ExpectTable(Base(LrDecayStyle::kLinear),
              {{0, 3e-4}, {32, 2.73e-4}, {160, 1.65e-4}, {288, 5.7e-5}, {320, 3e-5}, {321, 3e-5}, {100000, 3e-5}});
}

TEST(LearningRate, WarmupIsLinearFromItsInitialValueAndIncludesItsEnd) {
  ScheduleOptions options = Base(LrDecayStyle::kLinear, 64);
  ExpectTable(options, {{0, 0}, {16, 7.5e-5}, {32, 1.5e-4}, {64, 3e-4}, {192, 1.65e-4}, {320, 3e-5}});
  options.init_lr = 1e-4;
  ExpectTable(options, {{0, 1e-4}, {32, 2e-4}, {64, 3e-4}});
}

TEST(LearningRate, Constant) {
  ExpectTable(Base(LrDecayStyle::kConstant, 32), {{0, 0}, {16, 1.5e-4}, {32, 3e-4}, {320, 3e-4}, {1000000, 3e-4}});
}

TEST(LearningRate, Cosine) {
  const double quarter = 3e-5 + 0.5 * (std::sqrt(0.5) + 1) * 2.7e-4;  // cos(pi/4)
  ExpectTable(Base(LrDecayStyle::kCosine, 64), {{64, 3e-4}, {128, quarter}, {192, 1.65e-4}, {320, 3e-5}, {321, 3e-5}});
}

TEST(LearningRate, InverseSquareRoot) {
  ScheduleOptions options = Base(LrDecayStyle::kInverseSquareRoot, 64);
  ExpectTable(options, {{32, 1.5e-4}, {64, 3e-4}, {256, 1.5e-4}, {320, 3e-4 * std::sqrt(0.2)}, {321, 3e-5}});
  options.warmup_samples = 0;
  ExpectTable(options, {{0, 3e-4}, {4, 1.5e-4}, {100, 3e-5}, {200, 3e-5}});
}

TEST(LearningRate, WarmupStableDecay) {
  ScheduleOptions options = Base(LrDecayStyle::kWsd, 32);
  options.wsd_decay_samples = 128;  // From 192 on.
  const auto with = [&](WsdDecayStyle style) {
    options.wsd_style = style;
    return options;
  };
  const double range = 2.7e-4;
  ExpectTable(with(WsdDecayStyle::kLinear),
              {{16, 1.5e-4}, {33, 3e-4}, {192, 3e-4}, {224, 3e-5 + 0.75 * range}, {320, 3e-5}, {321, 3e-5}});
  ExpectTable(with(WsdDecayStyle::kCosine), {{192, 3e-4}, {256, 3e-5 + 0.5 * range}, {320, 3e-5}});
  ExpectTable(with(WsdDecayStyle::kExponential), {{192, 3e-4}, {256, 3e-5 + (std::sqrt(2.0) - 1) * range}, {320, 3e-5}});
  ExpectTable(with(WsdDecayStyle::kMinusSqrt), {{192, 3e-4}, {224, 3e-5 + 0.5 * range}, {320, 3e-5}});
}

TEST(WeightDecay, Styles) {
  ScheduleOptions options = Base(LrDecayStyle::kLinear);
  EXPECT_EQ(WeightDecay(options, 0), 0.01);
  EXPECT_EQ(WeightDecay(options, 1000), 0.01);
  options.start_weight_decay = 0.1;
  options.end_weight_decay = 0.5;
  options.weight_decay_style = WeightDecayStyle::kLinear;
  EXPECT_NEAR(WeightDecay(options, 0), 0.1, 1e-16);
  EXPECT_NEAR(WeightDecay(options, 80), 0.2, 1e-16);
  EXPECT_NEAR(WeightDecay(options, 320), 0.5, 1e-16);
  EXPECT_EQ(WeightDecay(options, 321), 0.5);
  options.weight_decay_style = WeightDecayStyle::kCosine;
  EXPECT_NEAR(WeightDecay(options, 0), 0.1, 1e-16);
  EXPECT_NEAR(WeightDecay(options, 160), 0.3, 1e-15);
  EXPECT_NEAR(WeightDecay(options, 80), 0.1 + 0.4 * 0.5 * (1 - std::sqrt(0.5)), 1e-15);
  EXPECT_NEAR(WeightDecay(options, 320), 0.5, 1e-16);
}

TEST(CheckSchedule, NamesTheKey) {
  const auto fields = [](const ScheduleOptions& options) {
    std::vector<std::string> names;
    for (const ScheduleProblem& problem : CheckSchedule(options)) names.push_back(problem.field);
    return names;
  };
  const auto changed = [](const std::function<void(ScheduleOptions&)>& change) {
    ScheduleOptions options = Base(LrDecayStyle::kWsd);
    options.wsd_decay_samples = 32;
    change(options);
    return options;
  };
  EXPECT_THAT(fields(changed([](auto&) {})), testing::IsEmpty());
  EXPECT_THAT(fields(changed([](auto& o) { o.min_lr = 1; })), testing::ElementsAre("optimizer.min_lr"));
  EXPECT_THAT(fields(changed([](auto& o) { o.min_lr = -1; })), testing::ElementsAre("optimizer.min_lr"));
  EXPECT_THAT(fields(changed([](auto& o) { o.init_lr = 1; })), testing::ElementsAre("scheduler.lr_warmup_init"));
  EXPECT_THAT(fields(changed([](auto& o) { o.warmup_samples = 320; })), testing::ElementsAre("scheduler.lr_warmup_iters"));
  EXPECT_THAT(fields(changed([](auto& o) { o.decay_samples = 0; })), testing::Contains("scheduler.lr_decay_iters"));
  EXPECT_THAT(fields(changed([](auto& o) { o.wsd_decay_samples = 0; })), testing::ElementsAre("scheduler.lr_wsd_decay_iters"));
  EXPECT_THAT(fields(changed([](auto& o) { o.end_weight_decay = 0.02; })),
              testing::ElementsAre("scheduler.weight_decay_incr_style"));
  EXPECT_THAT(fields(changed([](auto& o) { o.end_weight_decay = 0; })), testing::Contains("scheduler.end_weight_decay"));
}

TEST(ParseStyles, SpellingOfTheConfiguration) {
  EXPECT_EQ(ParseLrDecayStyle("inverse-square-root"), LrDecayStyle::kInverseSquareRoot);
  EXPECT_EQ(ParseLrDecayStyle("WSD"), LrDecayStyle::kWsd);
  EXPECT_EQ(ParseLrDecayStyle("wsd"), std::nullopt);
  EXPECT_EQ(ParseWsdDecayStyle("minus_sqrt"), WsdDecayStyle::kMinusSqrt);
  EXPECT_EQ(ParseWeightDecayStyle("cosine"), WeightDecayStyle::kCosine);
  EXPECT_EQ(ParseWeightDecayStyle("exponential"), std::nullopt);
}

}  // namespace
}  // namespace mbridge
