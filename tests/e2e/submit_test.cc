// Submitting, following, waiting, listing: what mbctl prints and how it exits.
#include <nlohmann/json.hpp>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class Submit : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }
  CommandResult Mbctl(Arguments arguments, const Arguments& more = {}, Seconds timeout = Seconds(90)) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return service_.Mbctl(arguments, timeout);
  }
  Service service_;
};

TEST_F(Submit, FollowPrintsMegatronsLinesAndExitsWithZero) {
  const CommandResult result = Mbctl({"submit", "--follow"}, TinyJob(10));
  ASSERT_THAT(result, Exited(0));
  const std::string all = result.out + result.err;
  EXPECT_THAT(all, ContainsRegex("iteration +1/ +10 \\| consumed samples: +4 \\|"));
  EXPECT_THAT(all, ContainsRegex("iteration +10/ +10 \\| consumed samples: +40 \\|.*lm loss: [0-9.]+E[+-][0-9]+"));
  EXPECT_THAT(all, HasSubstr("validation loss at iteration"));
  EXPECT_THAT(all, Not(HasSubstr("\x1b"))) << "no control codes in a pipe";
}

TEST_F(Submit, WaitExitsWithTheJobsCode) {
  EXPECT_THAT(Mbctl({"submit", "--wait"}, TinyJob(3)), Exited(0));
  // A loss that is not a number ends the job with REASON_NAN_LOSS: exit code 1.
  const CommandResult failed =
      Mbctl({"submit", "--wait"}, TinyJob(20, {"optimizer.lr=1e30", "optimizer.min_lr=1e30", "optimizer.clip_grad=0"}));
  EXPECT_THAT(failed, Exited(1));
  EXPECT_THAT(failed.out + failed.err, HasSubstr("NAN_LOSS"));
}

TEST_F(Submit, FailureInTheFirstSecondIsNotSuccess) {
  Service dying(Service::Options{.environment = {{"MB_FAILPOINTS", "train.iteration=kill"}}});
  ASSERT_TRUE(dying.Start()) << dying.log_text();
  Arguments arguments = {"submit", "--wait", "--max-restarts", "-1"};
  for (const std::string& argument : TinyJob(3)) arguments.push_back(argument);
  const CommandResult result = dying.Mbctl(arguments, Seconds(60));
  EXPECT_THAT(result, Exited(1));
  EXPECT_THAT(result.out + result.err, HasSubstr("RANK_CRASHED"));
  EXPECT_TRUE(dying.NoneLeft("mbrank"));
}

TEST_F(Submit, DryRunShowsOriginsAndMemoryAndStoresNothing) {
  const CommandResult result = Mbctl({"submit", "--dry-run"}, TinyJob(10));
  ASSERT_THAT(result, Exited(0));
  EXPECT_THAT(result.out, ContainsRegex("model.hidden_size.*32.*override"));
  EXPECT_THAT(result.out, ContainsRegex("optimizer.adam_beta2.*0.95.*recipe"));
  for (const char* memory_class : {"weight", "gradient", "optimizer", "activation"}) {
    EXPECT_THAT(result.out, HasSubstr(memory_class));
  }
  v1::ListJobsResponse jobs;
  grpc::ClientContext context;
  ASSERT_TRUE(service_.jobs().ListJobs(&context, {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 0);
}

// One number: of the dry run, of the job's record, of the rank's log.
TEST_F(Submit, DryRunSaysTheMemoryThatTheRankPlans) {
  const CommandResult dry = Mbctl({"submit", "--dry-run", "-o", "json"}, TinyJob(2));
  ASSERT_THAT(dry, Exited(0)) << dry.err;
  const auto resolved = nlohmann::json::parse(dry.out, nullptr, false);
  ASSERT_TRUE(!resolved.is_discarded() && resolved.contains("perRank")) << dry.out;
  const auto& estimate = resolved["perRank"];
  int64_t total = 0;
  for (const char* part :
       {"weightBytes", "gradientBytes", "optimizerBytes", "activationBytes", "workspaceBytes", "runtimeBytes"}) {
    if (estimate.contains(part)) total += std::stoll(estimate[part].get<std::string>());
  }
  const v1::Job job = service_.WaitForEnd(service_.Submit(TinyJob(2)));
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  const v1::MemoryEstimate& planned = job.resolved().per_rank();
  EXPECT_EQ(planned.weight_bytes() + planned.gradient_bytes() + planned.optimizer_bytes() + planned.activation_bytes() +
                planned.workspace_bytes() + planned.runtime_bytes(),
            total);
  const CommandResult log = Mbctl({"logs", job.job_id()});
  EXPECT_THAT(log.out, ContainsRegex("together +" + std::to_string((total + (1 << 19)) >> 20) + " MiB"));
}

TEST_F(Submit, JsonOutputIsTheJob) {
  const CommandResult submitted = Mbctl({"submit", "--wait", "-o", "json"}, TinyJob(3));
  ASSERT_THAT(submitted, Exited(0));
  const auto job = nlohmann::json::parse(submitted.out, nullptr, false);
  ASSERT_FALSE(job.is_discarded()) << submitted.out;
  ASSERT_TRUE(job.contains("jobId")) << submitted.out;
  const CommandResult got = Mbctl({"get", job["jobId"].get<std::string>(), "-o", "json"});
  ASSERT_THAT(got, Exited(0));
  const auto again = nlohmann::json::parse(got.out, nullptr, false);
  ASSERT_FALSE(again.is_discarded()) << got.out;
  EXPECT_EQ(again["state"], "JOB_STATE_SUCCEEDED");
  EXPECT_EQ(again["runName"], job["runName"]);
}

TEST_F(Submit, EveryOverriddenKeyKeepsItsValue) {
  const Arguments overrides = {"optimizer.weight_decay=0.07",
                               "optimizer.adam_beta2=0.97",
                               "optimizer.clip_grad=0.5",
                               "scheduler.lr_decay_style=linear",
                               "rng.seed=77",
                               "model.hidden_dropout=0.05"};
  const std::string id = service_.Submit(TinyJob(3, overrides));
  const v1::Job job = service_.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  for (const std::string& override_text : overrides) {
    const std::string key = override_text.substr(0, override_text.find('='));
    bool found = false;
    for (const v1::ResolvedValue& value : job.resolved().values()) {
      if (value.key() != key) continue;
      found = true;
      EXPECT_EQ(key + "=" + value.value(), override_text);
      EXPECT_EQ(value.origin(), v1::ORIGIN_OVERRIDE);
    }
    EXPECT_TRUE(found) << key;
  }
}

TEST_F(Submit, TensorParallelJobRunsOnTwoRanks) {
  const CommandResult result = Mbctl({"submit", "--wait", "-o", "json"},
                                     TinyJob(3, {"model.tensor_model_parallel_size=2", "model.sequence_parallel=true"}));
  ASSERT_THAT(result, Exited(0));
  const auto job = nlohmann::json::parse(result.out, nullptr, false);
  ASSERT_FALSE(job.is_discarded()) << result.out;
  const auto points = service_.TrainPoints(job["jobId"].get<std::string>());
  EXPECT_TRUE(CompleteSeries(points, 3));
  const v1::Job stored = service_.WaitForEnd(job["jobId"].get<std::string>());
  EXPECT_EQ(stored.resolved().ranks(), 2);
  EXPECT_EQ(stored.resolved().data_parallel_size(), 1);
  const CommandResult refused = Mbctl({"submit"}, TinyJob(3, {"model.tensor_model_parallel_size=4"}));
  EXPECT_THAT(refused, Exited(2));
  EXPECT_THAT(refused.err, HasSubstr("divisors of model.num_attention_heads 2"));
}

// Closed form: linear warm-up of 2 steps, then cosine to step 8; Megatron-LM prints the rate after the step.
TEST_F(Submit, LearningRateDecaysOverTheOverriddenLength) {
  const std::string id = service_.Submit(TinyJob(8, {"optimizer.lr=1e-3", "optimizer.min_lr=1e-4"}));
  ASSERT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
  const auto points = service_.TrainPoints(id);
  ASSERT_TRUE(CompleteSeries(points, 8));
  EXPECT_NEAR(points.front().learning_rate(), 1e-3, 1e-12);
  EXPECT_NEAR(points.back().learning_rate(), 1e-4, 1e-9) << "must not decay over the recipe's 300000 iterations";
}

TEST_F(Submit, SameRequestIdGivesTheSameJob) {
  const std::string request_id = "6f1f2c1e-0d36-4c5e-9c8e-3f1f6a3d7b10";
  const CommandResult first = Mbctl({"submit", "-o", "name", "--request-id", request_id}, TinyJob(3));
  const CommandResult second = Mbctl({"submit", "-o", "name", "--request-id", request_id}, TinyJob(3));
  ASSERT_THAT(first, Exited(0));
  ASSERT_THAT(second, Exited(0));
  EXPECT_EQ(first.out, second.out);
  const CommandResult other = Mbctl({"submit", "-o", "name", "--request-id", request_id}, TinyJob(4));
  EXPECT_THAT(other, Exited(2));
  EXPECT_THAT(other.err, HasSubstr("REQUEST_ID_REUSED"));
}

TEST_F(Submit, EachSubmitHasItsOwnRunNameAndDirectory) {
  const std::string a = service_.Submit(TinyJob(2));
  const std::string b = service_.Submit(TinyJob(2));
  const v1::Job first = service_.WaitForEnd(a);
  const v1::Job second = service_.WaitForEnd(b);
  EXPECT_NE(a, b);
  EXPECT_NE(first.run_name(), second.run_name());
  EXPECT_NE(first.run_directory(), second.run_directory());
}

TEST_F(Submit, ListDescribeLogsAndMetricsOfAFinishedJob) {
  const std::string id = service_.Submit(TinyJob(5, {"--name", "listed"}));
  ASSERT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
  const CommandResult ps = Mbctl({"ps", "-a"});
  EXPECT_THAT(ps, Exited(0));
  EXPECT_THAT(ps.out, AllOf(HasSubstr(id), HasSubstr("listed"), HasSubstr("SUCCEEDED")));
  EXPECT_THAT(Mbctl({"describe", id}).out, AllOf(HasSubstr(id), HasSubstr("COMPLETED")));
  EXPECT_THAT(Mbctl({"logs", id}).out, ContainsRegex("iteration +5/ +5"));
  const CommandResult metrics = Mbctl({"metrics", id, "-o", "json"});
  ASSERT_THAT(metrics, Exited(0));
  EXPECT_THAT(metrics.out, AllOf(HasSubstr("lmLoss"), HasSubstr("gradNorm")));
  EXPECT_THAT(Mbctl({"metrics", id}), Exited(0));
  EXPECT_THAT(Mbctl({"node", "ls"}).out, HasSubstr("READY"));
}

TEST_F(Submit, UnknownJobExitsWithThree) {
  for (const char* verb : {"get", "describe", "logs", "metrics", "cancel"}) {
    const CommandResult result = Mbctl({verb, "j-000000000000"});
    EXPECT_THAT(result, Exited(3)) << verb;
    EXPECT_THAT(result.err, HasSubstr("j-000000000000")) << verb;
  }
}

TEST_F(Submit, CompareFindsEqualAndDifferentRuns) {
  const std::string a = service_.Submit(TinyJob(4));
  const std::string b = service_.Submit(TinyJob(4));
  const std::string c = service_.Submit(TinyJob(4, {"rng.seed=4321"}));
  for (const std::string& id : {a, b, c}) ASSERT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_TRUE(SameLosses(service_.TrainPoints(a), service_.TrainPoints(b))) << "equal seeds must give equal bits";
  EXPECT_FALSE(SameLosses(service_.TrainPoints(a), service_.TrainPoints(c)));
  EXPECT_THAT(Mbctl({"compare", a, b}), Exited(0));
  EXPECT_NE(Mbctl({"compare", a, c}).exit_code, 0);
}

TEST_F(Submit, TwoRanksTrainThroughGloo) {
  const std::string one = service_.Submit(TinyJob(4));
  const std::string two = service_.Submit(TinyJob(4, {"--ranks", "2"}));
  ASSERT_EQ(service_.WaitForEnd(one).state(), v1::JOB_STATE_SUCCEEDED);
  const v1::Job job = service_.WaitForEnd(two);
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_EQ(job.attempts(0).placement_size(), 2);
  const auto a = service_.TrainPoints(one);
  const auto b = service_.TrainPoints(two);
  ASSERT_TRUE(CompleteSeries(b, 4));
  // Same samples at the first step; the dropout streams differ by rank.
  EXPECT_NEAR(a[0].lm_loss(), b[0].lm_loss(), 0.1);
}

}  // namespace
}  // namespace mbridge::e2e
