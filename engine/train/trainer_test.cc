// Runs of a tiny model: stop, resume, fork, and what the metric points say. Equal means equal to the last bit.
#include "engine/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>

#include "engine/comm/test_support.h"
#include "engine/core/failpoint.h"
#include "engine/core/watchdog.h"
#include "recipes/config/resolve.h"

namespace mbridge {
namespace {

using testing::HasSubstr;

using Overrides = std::vector<std::string>;

class Recorder : public EventSink {
 public:
  void Started(const v1::RankStarted& started) override { first_step = started.first_step(); }
  void Metric(const v1::MetricPoint& point) override {
    points.push_back(point);
    if (on_metric) on_metric(point);
    const bool last_of_step = (point.kind() == v1::METRIC_KIND_VALIDATION) == (point.step() % 2 == 0);
    if (last_of_step && stop_after > 0 && point.step() + 1 == stop_after) stop.store(true);
    if (point.kind() == v1::METRIC_KIND_TRAIN && point.step() == stop_in_evaluation_of) stop.store(true);
  }
  void CheckpointWritten(const v1::Checkpoint& checkpoint) override { checkpoints.push_back(checkpoint); }
  void Message(const std::string& text) override { messages.push_back(text); }

  int64_t first_step = -1;
  std::vector<v1::MetricPoint> points;
  std::vector<v1::Checkpoint> checkpoints;
  std::vector<std::string> messages;
  int64_t stop_after = 0;              // Iteration at whose end the run stops.
  int64_t stop_in_evaluation_of = -1;  // The stop comes after that iteration has looked for it.
  std::function<void(const v1::MetricPoint&)> on_metric;
  std::atomic<bool> stop{false};
};

class TrainerTest : public testing::Test {
 protected:
  void SetUp() override {
    omp_set_num_threads(1);  // Tiny steps: barriers of busy cores would cost more than the work.
    directory_ = std::filesystem::temp_directory_path() / ("mbridge_trainer_" + std::to_string(getpid()));
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // Eight iterations of four samples; evaluation every two.
  static TrainingPlan Plan(const Overrides& extra, int ranks = 1) {
    recipes::ResolveRequest request;
    request.recipe = "vanilla_gpt_megatron_lm_config";
    request.overrides = {"model.num_layers=1",         "model.hidden_size=32",      "model.num_attention_heads=2",
                         "model.ffn_hidden_size=64",   "model.seq_length=32",       "dataset.seq_length=32",
                         "tokenizer.vocab_size=128",   "train.global_batch_size=4", "train.micro_batch_size=2",
                         "validation.eval_interval=2", "validation.eval_iters=1",   "scheduler.lr_decay_iters=8"};
    for (const std::string& line : extra) {
      std::erase_if(request.overrides,
                    [&](const std::string& base) { return base.starts_with(line.substr(0, line.find('=') + 1)); });
      request.overrides.push_back(line);
    }
    request.ranks = ranks;
    const auto resolved = recipes::Resolve(request);
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    const auto plan = MakeTrainingPlan(*resolved);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *plan;
  }

  v1::RankResult Run(const Overrides& overrides, Recorder* recorder, const std::string& job, const std::string& load = {},
                     bool weights_only = false) {
    const TrainingPlan plan = Plan(overrides);
    RunIdentity identity;
    identity.job_id = job;
    identity.checkpoint_directory = directory_ / "run";
    identity.load_checkpoint_path = load;
    identity.load_weights_only = weights_only;
    const auto world = MakeSelfCommunicator();
    Trainer trainer(plan, {}, identity, world.get(), recorder, &recorder->stop);
    return trainer.Run();
  }

  // The same on several ranks, threads of this process; the recorder is the first one's.
  void RunOnRanks(int ranks, const Overrides& overrides, Recorder* recorder, const std::string& job,
                  const std::string& load = {}) {
    const TrainingPlan plan = Plan(overrides, ranks);
    RunIdentity identity;
    identity.job_id = job;
    identity.checkpoint_directory = directory_ / "run";
    identity.load_checkpoint_path = load;
    OnRanks(ranks, [&](Communicator& world) {
      omp_set_num_threads(1);
      Trainer trainer(plan, {}, identity, &world, world.rank() == 0 ? recorder : nullptr, &recorder->stop);
      EXPECT_EQ(trainer.Run().reason(), v1::REASON_COMPLETED);
    });
  }

  static void ExpectLossesNear(const Recorder& a, const Recorder& b, double bound) {
    ASSERT_EQ(a.points.size(), b.points.size());
    for (size_t i = 0; i < a.points.size(); ++i) {
      EXPECT_EQ(a.points[i].step(), b.points[i].step());
      EXPECT_NEAR(a.points[i].lm_loss(), b.points[i].lm_loss(), bound) << "step " << a.points[i].step();
      EXPECT_NEAR(a.points[i].grad_norm(), b.points[i].grad_norm(), 10 * bound) << "step " << a.points[i].step();
    }
  }

  // A straight run against one that stops after `stop` iterations and is resumed.
  void ExpectSameAfterResume(Overrides overrides, int64_t stop, bool in_evaluation = false) {
    std::filesystem::remove_all(directory_ / "run");
    overrides.push_back("train.train_iters=8");
    overrides.push_back("logger.log_interval=1");
    overrides.push_back("optimizer.lr=1e-2");
    overrides.push_back("optimizer.min_lr=1e-3");
    Recorder straight, first, second;
    EXPECT_EQ(Run(overrides, &straight, "straight").reason(), v1::REASON_COMPLETED);
    (in_evaluation ? first.stop_in_evaluation_of : first.stop_after) = stop;
    EXPECT_EQ(Run(overrides, &first, "first").reason(), v1::REASON_CANCELLED_BY_USER);
    ASSERT_EQ(first.checkpoints.size(), 1u);
    EXPECT_EQ(first.checkpoints[0].step(), stop);
    EXPECT_EQ(Run(overrides, &second, "second", first.checkpoints[0].path()).reason(), v1::REASON_COMPLETED);
    EXPECT_EQ(second.first_step, stop);
    std::vector<v1::MetricPoint> joined = first.points;
    joined.insert(joined.end(), second.points.begin(), second.points.end());
    ASSERT_EQ(joined.size(), straight.points.size());
    for (size_t i = 0; i < joined.size(); ++i) ExpectSamePoint(joined[i], straight.points[i]);
  }

  static void ExpectSamePoint(const v1::MetricPoint& a, const v1::MetricPoint& b) {
    EXPECT_EQ(a.kind(), b.kind());
    EXPECT_EQ(a.step(), b.step());
    EXPECT_EQ(a.final_pass(), b.final_pass());
    EXPECT_EQ(a.lm_loss(), b.lm_loss()) << "kind " << a.kind() << " step " << a.step();
    EXPECT_TRUE(a.grad_norm() == b.grad_norm() || (std::isnan(a.grad_norm()) && std::isnan(b.grad_norm())))
        << "step " << a.step();
    EXPECT_EQ(a.learning_rate(), b.learning_rate()) << "step " << a.step();
    EXPECT_EQ(a.loss_scale(), b.loss_scale()) << "step " << a.step();
    EXPECT_EQ(a.consumed_samples(), b.consumed_samples()) << "step " << a.step();
    EXPECT_EQ(a.skipped_iterations(), b.skipped_iterations()) << "step " << a.step();
  }

  std::filesystem::path directory_;
};

// Stop at a step whose evaluation is due (4) and at one where it is not (3).
TEST_F(TrainerTest, ResumeIsExactBf16) {
  ExpectSameAfterResume({}, 3);
  ExpectSameAfterResume({"rng.seed=5"}, 4);
}

// The evaluation is left at once, and the resumed run does it from its beginning.
TEST_F(TrainerTest, ResumeAfterAStopInAnEvaluationIsExact) { ExpectSameAfterResume({}, 4, true); }

// All iterations are trained and saved by then: the resumed run only evaluates, as the straight one does. Iteration 9 has no
// evaluation of its own, 8 has; the stop comes in the one after training, or in the last iteration.
TEST_F(TrainerTest, AStopInTheFinalEvaluationLeavesItToTheResumedRun) {
  struct Case {
    int64_t iterations, stop_in_evaluation_of, stop_after;
  };
  for (const auto& [iterations, in_evaluation, after] : {Case{9, 9, 0}, Case{8, -1, 8}}) {
    std::filesystem::remove_all(directory_ / "run");
    const Overrides overrides = {fmt::format("train.train_iters={}", iterations), "optimizer.lr=1e-3", "optimizer.min_lr=0",
                                 "logger.log_interval=1"};
    Recorder straight, first, second;
    EXPECT_EQ(Run(overrides, &straight, "straight").reason(), v1::REASON_COMPLETED);
    first.stop_in_evaluation_of = in_evaluation;
    first.stop_after = after;
    const v1::RankResult result = Run(overrides, &first, "first");
    EXPECT_EQ(result.reason(), v1::REASON_CANCELLED_BY_USER);
    EXPECT_EQ(result.last_step(), iterations);
    EXPECT_THAT(result.detail(), HasSubstr("all are trained and saved, a resume does the evaluation that is left"));
    EXPECT_EQ(first.points.back().kind(), v1::METRIC_KIND_TRAIN);
    ASSERT_EQ(first.checkpoints.size(), 1u);
    EXPECT_EQ(first.checkpoints[0].step(), iterations);

    EXPECT_EQ(Run(overrides, &second, "second", first.checkpoints[0].path()).reason(), v1::REASON_COMPLETED);
    EXPECT_TRUE(second.checkpoints.empty()) << "nothing has changed since";
    std::vector<v1::MetricPoint> joined = first.points;
    joined.insert(joined.end(), second.points.begin(), second.points.end());
    ASSERT_EQ(joined.size(), straight.points.size());
    for (size_t i = 0; i < joined.size(); ++i) ExpectSamePoint(joined[i], straight.points[i]);
    EXPECT_TRUE(second.points.back().final_pass());
  }
}

TEST_F(TrainerTest, AStopAfterAllIsDoneIsNoCancel) {
  Recorder recorder;
  recorder.stop_after = 9;
  const v1::RankResult result =
      Run({"train.train_iters=9", "optimizer.lr=1e-3", "optimizer.min_lr=0", "logger.log_interval=1", "validation.eval_iters=0"},
          &recorder, "last");
  EXPECT_EQ(result.reason(), v1::REASON_COMPLETED) << result.detail();
  EXPECT_EQ(recorder.checkpoints.size(), 1u);
}

TEST_F(TrainerTest, ResumeIsExactFp32WithChangingWeightDecay) {
  ExpectSameAfterResume(
      {"mixed_precision=null", "scheduler.start_weight_decay=0.01", "scheduler.end_weight_decay=0.2",
       "scheduler.weight_decay_incr_style=cosine", "scheduler.lr_decay_style=cosine", "scheduler.lr_warmup_iters=2"},
      5);
}

// The scale starts too high, so that steps are skipped before and after the stop.
TEST_F(TrainerTest, ResumeIsExactFp16WithDynamicLossScale) {
  ExpectSameAfterResume({"mixed_precision=fp16_mixed", "optimizer.initial_loss_scale=16777216", "optimizer.hysteresis=1",
                         "optimizer.loss_scale_window=2"},
                        3);
}

// With lines every 4 iterations, a stop after 3 leaves their sum to the resumed run.
TEST_F(TrainerTest, LogIntervalAveragesAcrossAResume) {
  const Overrides common = {"train.train_iters=8", "optimizer.lr=1e-2", "optimizer.min_lr=0"};
  Overrides straight_overrides = common, stop_overrides = common;
  straight_overrides.push_back("logger.log_interval=4");
  stop_overrides.push_back("logger.log_interval=4");
  stop_overrides.push_back("train.exit_interval=3");
  Recorder straight, first, second;
  Run(straight_overrides, &straight, "straight");
  Run(stop_overrides, &first, "first");
  Run(straight_overrides, &second, "second", first.checkpoints.at(0).path());
  const auto training_point = [](const Recorder& recorder, int64_t step) {
    for (const v1::MetricPoint& point : recorder.points) {
      if (point.kind() == v1::METRIC_KIND_TRAIN && point.step() == step) return point;
    }
    ADD_FAILURE() << "no point of step " << step;
    return v1::MetricPoint();
  };
  ExpectSamePoint(training_point(second, 4), training_point(straight, 4));
  ExpectSamePoint(training_point(second, 8), training_point(straight, 8));
}

// Closed form: Megatron-LM prints the rate of the next iteration, max - (max - min) * step / 8 for the linear decay.
TEST_F(TrainerTest, RatesOfTheFirstResumedStep) {
  const Overrides overrides = {"train.train_iters=8", "optimizer.lr=8e-3", "optimizer.min_lr=0", "train.exit_interval=3",
                               "logger.log_interval=1"};
  Recorder first, second;
  EXPECT_EQ(Run(overrides, &first, "first").reason(), v1::REASON_COMPLETED);
  Run({"train.train_iters=8", "optimizer.lr=8e-3", "optimizer.min_lr=0", "logger.log_interval=1"}, &second, "second",
      first.checkpoints.at(0).path());
  const TrainingPlan plan = Plan(overrides);
  ASSERT_FALSE(second.points.empty());
  EXPECT_EQ(second.points[0].step(), 4);
  EXPECT_NEAR(second.points[0].learning_rate(), 8e-3 * (1 - 4.0 / 8), 1e-15);
  EXPECT_EQ(WeightDecay(plan.schedule, 3 * 4), 0.01);
  EXPECT_EQ(second.points[0].consumed_samples(), 16);
}

// The run passes steps again from an earlier checkpoint; the folders of the first pass stay as they are.
TEST_F(TrainerTest, ResumeFromAnEarlierCheckpointWritesOtherFolders) {
  const Overrides overrides = {"train.train_iters=8", "optimizer.lr=1e-3", "optimizer.min_lr=0", "checkpoint.save_interval=2"};
  Recorder first, second;
  Run(overrides, &first, "first");
  ASSERT_EQ(first.checkpoints.size(), 4u);
  EXPECT_EQ(Run(overrides, &second, "second", first.checkpoints[0].path()).reason(), v1::REASON_COMPLETED);
  ASSERT_EQ(second.checkpoints.size(), 3u);
  EXPECT_NE(second.checkpoints[0].path(), first.checkpoints[1].path());
  EXPECT_EQ(second.checkpoints[0].step(), first.checkpoints[1].step());
}

TEST_F(TrainerTest, WeightsOnlyForkStartsScheduleAndDataAnew) {
  const Overrides overrides = {"train.train_iters=8", "optimizer.lr=1e-2", "optimizer.min_lr=0"};
  Recorder first, fork;
  Run(overrides, &first, "first");
  Run(overrides, &fork, "fork", first.checkpoints.at(0).path(), true);
  EXPECT_EQ(fork.first_step, 0);
  ASSERT_FALSE(fork.points.empty());
  EXPECT_EQ(fork.points[0].step(), 1);
  EXPECT_EQ(fork.points[0].learning_rate(), first.points[0].learning_rate());
  EXPECT_EQ(fork.points[0].consumed_samples(), 4);
  EXPECT_LT(fork.points[0].lm_loss(), first.points[0].lm_loss());  // Same samples, trained weights.
}

TEST_F(TrainerTest, SaysThatCpusRecordNoGraphs) {
  for (const bool wanted : {false, true}) {
    Recorder recorder;
    Run({"train.exit_interval=1", wanted ? "model.cuda_graph_impl=local" : "model.cuda_graph_impl=none"}, &recorder,
        wanted ? "wanted" : "none");
    const auto said = testing::Contains(HasSubstr("model.cuda_graph_impl has no effect on CPUs"));
    if (wanted)
      EXPECT_THAT(recorder.messages, said);
    else
      EXPECT_THAT(recorder.messages, testing::Not(said));
  }
}

// Gated MLP, grouped queries and no dropout; the vocabulary needs the same padding on one rank and on two.
Overrides ForSeveralRanks(const Overrides& more) {
  Overrides overrides = {"train.train_iters=8",        "optimizer.lr=1e-2",           "optimizer.min_lr=1e-3",
                         "logger.log_interval=1",      "tokenizer.vocab_size=256",    "model.num_attention_heads=4",
                         "model.num_query_groups=2",   "model.hidden_dropout=0",      "model.attention_dropout=0",
                         "model.activation_func=silu", "model.gated_linear_unit=true"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

Overrides And(Overrides overrides, const std::string& more) {
  overrides.push_back(more);
  return overrides;
}

const char* const kTwoRanks = "model.tensor_model_parallel_size=2";

TEST_F(TrainerTest, TensorParallelRanksGoOnFromOneRanksCheckpoint) {
  for (const auto& [precision, bound] :
       {std::pair{"mixed_precision=null", 1e-5}, std::pair{"mixed_precision=bf16_mixed", 1e-3}}) {
    std::filesystem::remove_all(directory_ / "run");
    const Overrides common = ForSeveralRanks({precision});
    Recorder first, one, two, sequence;
    Run(And(common, "train.exit_interval=3"), &first, "first");
    const std::string checkpoint = first.checkpoints.at(0).path();
    Run(common, &one, "one", checkpoint);
    RunOnRanks(2, And(common, kTwoRanks), &two, "two", checkpoint);
    RunOnRanks(2, And(And(common, kTwoRanks), "model.sequence_parallel=true"), &sequence, "sequence", checkpoint);
    ASSERT_FALSE(one.points.empty());
    EXPECT_EQ(one.points[0].step(), 4);
    ExpectLossesNear(two, one, bound);
    ExpectLossesNear(sequence, one, bound);
  }
}

// Also with data parallelism and the distributed optimizer: each of four ranks writes its part of the state.
TEST_F(TrainerTest, OneRankGoesOnFromTensorParallelRanksCheckpoint) {
  const Overrides common = ForSeveralRanks({"mixed_precision=null"});
  for (const int ranks : {2, 4}) {
    std::filesystem::remove_all(directory_ / "run");
    Overrides parallel = And(And(common, kTwoRanks), "model.sequence_parallel=true");
    if (ranks == 4) parallel = And(And(parallel, "ddp.use_distributed_optimizer=true"), "train.micro_batch_size=1");
    Recorder straight, first, again, one;
    RunOnRanks(ranks, parallel, &straight, "straight");
    RunOnRanks(ranks, And(parallel, "train.exit_interval=3"), &first, "first");
    const std::string checkpoint = first.checkpoints.at(0).path();
    RunOnRanks(ranks, parallel, &again, "again", checkpoint);
    Run(common, &one, "one", checkpoint);
    ASSERT_EQ(first.points.size() + again.points.size(), straight.points.size());
    for (size_t i = 0; i < again.points.size(); ++i) ExpectSamePoint(again.points[i], straight.points[first.points.size() + i]);
    ExpectLossesNear(one, again, 1e-5);
  }
}

// Everything that a run's checkpoints hold beside their manifests, which name the job.
std::map<std::string, std::string> SavedBytes(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().lexically_relative(folder)] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  return files;
}

// Several buckets: tables, two of layers, and parts of both.
TEST_F(TrainerTest, OverlappedTrafficOfDataParallelRanksChangesNoBit) {
  struct Case {
    int ranks;
    Overrides more;
  };
  const char *const sharded = "ddp.use_distributed_optimizer=true", *const tied =
                                                                        "model.share_embeddings_and_output_weights=true";
  const char *const untied = "model.share_embeddings_and_output_weights=false", *const wide = "mixed_precision=null";
  const Overrides recompute = {"model.recompute_granularity=full", "model.recompute_method=uniform",
                               "model.recompute_num_layers=1"};
  const std::vector<Case> cases = {
      {2, {tied, "train.global_batch_size=4"}},
      {2, {untied, wide, "train.global_batch_size=12"}},
      {2, {tied, wide, sharded, "train.global_batch_size=12"}},
      {2, {untied, sharded, "train.global_batch_size=4", recompute[0], recompute[1], recompute[2]}},
      {2, {tied, sharded, "mixed_precision=bf16_with_fp8_delayed_scaling_mixed", "train.global_batch_size=4"}},
      {4, {untied, wide, sharded, kTwoRanks, "model.sequence_parallel=true", "train.global_batch_size=4"}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    Overrides common = {"model.num_layers=3",          "model.hidden_size=64",      "model.ffn_hidden_size=128",
                        "tokenizer.vocab_size=256",    "train.train_iters=3",       "optimizer.lr=1e-2",
                        "optimizer.min_lr=1e-3",       "logger.log_interval=1",     "logger.log_params_norm=true",
                        "validation.eval_interval=2",  "ddp.bucket_size=1",         "checkpoint.save_interval=2",
                        "model.num_attention_heads=4", "scheduler.lr_decay_iters=3"};
    common.insert(common.end(), cases[i].more.begin(), cases[i].more.end());
    Recorder apart, beside;
    std::map<std::string, std::string> saved;
    for (Recorder* recorder : {&apart, &beside}) {
      std::filesystem::remove_all(directory_ / "run");
      const char* const on = recorder == &beside ? "true" : "false";
      RunOnRanks(cases[i].ranks,
                 And(And(common, std::string("ddp.overlap_grad_reduce=") + on), std::string("ddp.overlap_param_gather=") + on),
                 recorder, "job");
      if (recorder == &apart) saved = SavedBytes(directory_ / "run");
    }
    EXPECT_THAT(apart.messages, testing::Contains(HasSubstr("after backward"))) << i;
    EXPECT_THAT(beside.messages, testing::Contains(testing::AllOf(HasSubstr(" buckets of"), HasSubstr("while backward runs"))))
        << i;
    ASSERT_EQ(apart.points.size(), beside.points.size());
    ASSERT_GE(apart.points.size(), 4u);
    for (size_t k = 0; k < apart.points.size(); ++k) {
      ExpectSamePoint(apart.points[k], beside.points[k]);
      EXPECT_EQ(apart.points[k].params_norm(), beside.points[k].params_norm()) << i;
    }
    EXPECT_FALSE(saved.empty());
    EXPECT_TRUE(saved == SavedBytes(directory_ / "run")) << "checkpoints of case " << i;
  }
}

TEST_F(TrainerTest, VeryManyBucketsAreSaidOnce) {
  Recorder recorder;
  RunOnRanks(2,
             {"tokenizer.vocab_size=70000", "train.train_iters=1", "scheduler.lr_decay_iters=1", "optimizer.lr=1e-3",
              "optimizer.min_lr=0", "validation.eval_iters=0", "ddp.bucket_size=1"},
             &recorder, "job");
  EXPECT_EQ(std::count_if(recorder.messages.begin(), recorder.messages.end(),
                          [](const std::string& line) { return line.starts_with("warning: ddp.bucket_size=1 makes "); }),
            1);
}

// Draws go on where they were, on each rank.
TEST_F(TrainerTest, TensorParallelResumeIsExactWithDropout) {
  for (const char* sequence : {"model.sequence_parallel=true", "model.sequence_parallel=false"}) {
    std::filesystem::remove_all(directory_ / "run");
    Overrides parallel = ForSeveralRanks({kTwoRanks, sequence});
    std::replace(parallel.begin(), parallel.end(), std::string("model.hidden_dropout=0"),
                 std::string("model.hidden_dropout=0.1"));
    std::replace(parallel.begin(), parallel.end(), std::string("model.attention_dropout=0"),
                 std::string("model.attention_dropout=0.1"));
    Recorder straight, first, again;
    RunOnRanks(2, parallel, &straight, "straight");
    RunOnRanks(2, And(parallel, "train.exit_interval=3"), &first, "first");
    RunOnRanks(2, parallel, &again, "again", first.checkpoints.at(0).path());
    ASSERT_EQ(first.points.size() + again.points.size(), straight.points.size());
    for (size_t i = 0; i < again.points.size(); ++i) ExpectSamePoint(again.points[i], straight.points[first.points.size() + i]);
  }
}

// Losses of 24 iterations of a model of three layers, one of them wide at either end where the preset says so.
std::vector<double> LossesOf(const Recorder& recorder) {
  std::vector<double> losses;
  for (const v1::MetricPoint& point : recorder.points) {
    if (point.kind() == v1::METRIC_KIND_TRAIN) losses.push_back(point.lm_loss());
  }
  return losses;
}

TEST_F(TrainerTest, NarrowLinearLayersTrainLikeBf16) {
  const Overrides common = {"model.num_layers=3",     "train.train_iters=24",        "optimizer.lr=1e-2",
                            "optimizer.min_lr=1e-3",  "scheduler.lr_decay_iters=24", "logger.log_interval=1",
                            "model.hidden_dropout=0", "model.attention_dropout=0",   "validation.eval_interval=100"};
  Recorder wide;
  Run(common, &wide, "bf16");
  const std::vector<double> expected = LossesOf(wide);
  ASSERT_EQ(expected.size(), 24u);
  EXPECT_LT(expected.back(), expected.front() - 0.5);
  // Bounds of the mean and of each relative gap: those that FP8 training is accepted by, twice as much for 4 bits.
  for (const auto& [preset, bound] : {std::pair{"bf16_with_fp8_delayed_scaling_mixed", 0.01},
                                      {"bf16_with_fp8_current_scaling_mixed", 0.01},
                                      {"bf16_with_fp8_subchannel_scaling_mixed", 0.01},
                                      {"bf16_with_mxfp8_mixed", 0.01},
                                      {"bf16_with_nvfp4_mixed", 0.02},
                                      {"fp16_with_fp8_current_scaling_mixed", 0.01}}) {
    std::filesystem::remove_all(directory_ / "run");
    Recorder narrow;
    Overrides overrides = And(common, std::string("mixed_precision=") + preset);
    if (std::string(preset).starts_with("fp16")) overrides.push_back("optimizer.initial_loss_scale=1024");
    Run(overrides, &narrow, preset);
    const std::vector<double> losses = LossesOf(narrow);
    ASSERT_EQ(losses.size(), expected.size());
    double worst = 0, sum = 0;
    for (size_t i = 0; i < losses.size(); ++i) {
      const double gap = std::fabs(losses[i] / expected[i] - 1);
      worst = std::max(worst, gap);
      sum += gap;
    }
    EXPECT_LT(sum / static_cast<double>(losses.size()), bound) << preset;
    EXPECT_LT(worst, 2 * bound) << preset;
    EXPECT_GT(worst, 0) << preset;
  }
}

// History and scales are part of the state; so are the draws of stochastic rounding.
TEST_F(TrainerTest, ResumeIsExactWithNarrowLinearLayers) {
  ExpectSameAfterResume({"mixed_precision=bf16_with_fp8_delayed_scaling_mixed", "model.fp8_amax_history_len=4"}, 3);
  ExpectSameAfterResume({"mixed_precision=bf16_with_fp8_current_scaling_mixed", "model.num_layers=3"}, 4);
  ExpectSameAfterResume({"mixed_precision=bf16_with_nvfp4_mixed"}, 3);
  ExpectSameAfterResume({"mixed_precision=fp16_with_fp8_delayed_scaling_mixed", "optimizer.initial_loss_scale=16777216",
                         "optimizer.hysteresis=1", "optimizer.loss_scale_window=2"},
                        3);
}

// Each rank scales its part of a weight by itself: not the same sums, the same training.
TEST_F(TrainerTest, TensorParallelRanksTrainNarrowLinearLayersAsOneDoes) {
  for (const char* preset : {"bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed"}) {
    const Overrides common = ForSeveralRanks({std::string("mixed_precision=") + preset});
    Recorder first, one, two, sequence;
    std::filesystem::remove_all(directory_ / "run");
    Run(And(common, "train.exit_interval=3"), &first, "first");
    const std::string checkpoint = first.checkpoints.at(0).path();
    Run(common, &one, "one", checkpoint);
    RunOnRanks(2, And(common, kTwoRanks), &two, "two", checkpoint);
    RunOnRanks(2, And(And(common, kTwoRanks), "model.sequence_parallel=true"), &sequence, "sequence", checkpoint);
    ExpectLossesNear(two, one, 2e-2);
    ExpectLossesNear(sequence, two, 1e-3);
  }
}

// Experts beside a shared one, and latent attention where `latent`.
Overrides WithExperts(bool latent) {
  Overrides overrides =
      ForSeveralRanks({"mixed_precision=null", "model.num_layers=2", "model.normalization=RMSNorm", "model.add_bias_linear=false",
                       "model.position_embedding_type=rope", "model.num_moe_experts=4", "model.moe_layer_freq=[0,1]",
                       "model.moe_ffn_hidden_size=16", "model.moe_router_topk=2", "model.moe_shared_expert_intermediate_size=16",
                       "model.moe_router_load_balancing_type=aux_loss", "model.moe_aux_loss_coeff=0.01"});
  if (!latent) return overrides;
  for (const char* line :
       {"model.multi_latent_attention=true", "model.qk_layernorm=true", "model.q_lora_rank=12", "model.kv_lora_rank=16",
        "model.qk_head_dim=8", "model.qk_pos_emb_head_dim=4", "model.v_head_dim=8", "model.rope_type=rope"}) {
    overrides.emplace_back(line);
  }
  return overrides;
}

TEST_F(TrainerTest, TensorParallelRanksShareExpertsAndLatentAttention) {
  for (const bool latent : {false, true}) {
    std::filesystem::remove_all(directory_ / "run");
    const Overrides common = WithExperts(latent);
    Recorder first, one, two, sequence;
    Run(And(common, "train.exit_interval=3"), &first, "first");
    const std::string checkpoint = first.checkpoints.at(0).path();
    Run(common, &one, "one", checkpoint);
    RunOnRanks(2, And(common, kTwoRanks), &two, "two", checkpoint);
    RunOnRanks(2, And(And(common, kTwoRanks), "model.sequence_parallel=true"), &sequence, "sequence", checkpoint);
    ASSERT_FALSE(one.points.empty());
    ExpectLossesNear(two, one, 1e-5);
    ExpectLossesNear(sequence, one, 1e-5);
  }
}

// Keys of Nemotron-H's and Falcon-H1's kinds of layers, and of Qwen3-Next's.
Overrides Hybrid() {
  return {"model.num_layers=5",          "model.is_hybrid_model=true",   "model.hybrid_layer_pattern=M*-PE",
          "model.num_moe_experts=4",     "model.moe_router_topk=2",      "model.mamba_state_dim=8",
          "model.mamba_head_dim=8",      "model.mamba_num_groups=2",     "model.mamba_num_heads=4",
          "model.normalization=RMSNorm", "model.add_bias_linear=false",  "model.moe_ffn_hidden_size=16",
          "model.activation_func=silu",  "model.gated_linear_unit=true", "model.position_embedding_type=none"};
}
Overrides Delta() {
  return {"model.num_layers=4",
          "model.experimental_attention_variant=gated_delta_net",
          "model.linear_attention_freq=4",
          "model.linear_key_head_dim=8",
          "model.linear_value_head_dim=12",
          "model.linear_num_key_heads=2",
          "model.linear_num_value_heads=4",
          "model.attention_output_gate=true",
          "model.qk_layernorm=true",
          "model.normalization=RMSNorm",
          "model.add_bias_linear=false",
          "model.position_embedding_type=rope",
          "model.activation_func=silu",
          "model.gated_linear_unit=true"};
}

TEST_F(TrainerTest, ResumeIsExactWithOtherMixers) {
  for (const Overrides& layers : {Hybrid(), Delta()}) {
    ExpectSameAfterResume(layers, 3);
    ExpectSameAfterResume(And(layers, "mixed_precision=null"), 4);
  }
}

TEST_F(TrainerTest, RecomputationTrainsOtherMixersToTheSameBits) {
  for (const Overrides& layers : {Hybrid(), Delta()}) {
    Overrides common = layers;
    for (const char* line : {"train.train_iters=8", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3", "logger.log_interval=1"})
      common.emplace_back(line);
    const Overrides full = {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=2"};
    const Overrides selective = {"model.recompute_granularity=selective", "model.recompute_modules=[core_attn,mlp,layernorm]"};
    Recorder kept;
    std::filesystem::remove_all(directory_ / "run");
    Run(common, &kept, "kept");
    ASSERT_FALSE(kept.points.empty());
    EXPECT_LT(LossesOf(kept).back(), LossesOf(kept).front() - 0.05);
    for (const Overrides& way : {full, selective}) {
      Overrides overrides = common;
      overrides.insert(overrides.end(), way.begin(), way.end());
      Recorder again;
      std::filesystem::remove_all(directory_ / "run");
      Run(overrides, &again, "again");
      ASSERT_EQ(again.points.size(), kept.points.size());
      for (size_t i = 0; i < again.points.size(); ++i) ExpectSamePoint(again.points[i], kept.points[i]);
    }
  }
}

TEST_F(TrainerTest, NaNLossIsReportedAndEndsTheRunWithoutACheckpoint) {
  Recorder recorder;
  try {
    Run({"train.train_iters=8", "optimizer.lr=1e30", "optimizer.min_lr=0", "mixed_precision=null"}, &recorder, "nan");
    FAIL() << "the run did not end";
  } catch (const EngineError& error) {
    EXPECT_EQ(error.reason(), v1::REASON_NAN_LOSS);
    EXPECT_THAT(error.what(), HasSubstr("iteration"));
  }
  ASSERT_FALSE(recorder.points.empty());
  EXPECT_GE(recorder.points.back().nan_iterations() + recorder.points.back().skipped_iterations(), 1);
  EXPECT_TRUE(recorder.checkpoints.empty());
}

// As on a GPU, where the host does not know whether the gather after an update is done.
TEST_F(TrainerTest, DataThatComeLateAreNoFaultOfACollective) {
  std::promise<std::string> ended;
  WatchdogOptions options;
  options.timeout_seconds = 0.6;
  options.grace_seconds = 0.2;
  options.end = [&](v1::Reason, const std::string& detail) { ended.set_value(detail); };
  const Watchdog watchdog(options);
  for (const char* read : {"3", "6"}) {  // Of the training, of an evaluation: two microbatches each.
    ASSERT_EQ(::setenv("MB_FAILPOINTS", (std::string("train.read=sleep:1500@") + read).c_str(), 1), 0);
    ReloadFailpoints();
    std::filesystem::remove_all(directory_ / "run");
    Recorder recorder;
    recorder.on_metric = [](const v1::MetricPoint& point) {
      point.kind() == v1::METRIC_KIND_TRAIN ? NoteEnqueued("all-gather", "world") : NoteIdle();
    };
    Run({"train.train_iters=2", "scheduler.lr_decay_iters=2", "optimizer.lr=1e-3", "optimizer.min_lr=0", "logger.log_interval=1"},
        &recorder, read);
  }
  ::unsetenv("MB_FAILPOINTS");
  ReloadFailpoints();
  std::future<std::string> detail = ended.get_future();
  EXPECT_EQ(detail.wait_for(std::chrono::seconds(0)), std::future_status::timeout) << detail.get();
}

TEST_F(TrainerTest, MissingCheckpointIsRefused) {
  Recorder recorder;
  EXPECT_THROW(Run({"train.train_iters=8", "optimizer.lr=1e-3", "optimizer.min_lr=0"}, &recorder, "x", directory_ / "absent"),
               EngineError);
  EXPECT_TRUE(recorder.points.empty());
}

}  // namespace
}  // namespace mbridge
