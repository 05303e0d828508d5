// Bad input: refused at submit, with the field, the value, the rule and the next step.
#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::HasSubstr;

class BadInput : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }

  // The submit with the overrides on top of a good job exits with `code`, its message holds every text, nothing is stored.
  void ExpectRefused(const Arguments& more, int code, const std::vector<std::string>& texts) {
    Arguments arguments = {"submit"};
    for (const std::string& argument : TinyJob(10, more)) arguments.push_back(argument);
    const CommandResult result = service_.Mbctl(arguments);
    EXPECT_THAT(result, Exited(code));
    for (const std::string& text : texts) EXPECT_THAT(result.err, HasSubstr(text));
    EXPECT_EQ(result.out, "") << "errors go to standard error";
    v1::ListJobsResponse jobs;
    grpc::ClientContext context;
    ASSERT_TRUE(service_.jobs().ListJobs(&context, {}, &jobs).ok());
    EXPECT_EQ(jobs.jobs_size(), 0);
  }

  Service service_;
};

TEST_F(BadInput, MistypedKeySuggestsTheRightOne) {
  ExpectRefused({"model.hiden_size=64"}, 2, {"model.hiden_size", "model.hidden_size"});
}

TEST_F(BadInput, PlusPrefixesAreAsStrict) {
  ExpectRefused({"+model.hiden_size=64"}, 2, {"model.hiden_size", "model.hidden_size"});
  ExpectRefused({"++model.hiden_size=64"}, 2, {"model.hiden_size", "model.hidden_size"});
  ExpectRefused({"~model.hidden_size"}, 2, {"~model.hidden_size"});
}

TEST_F(BadInput, WrongType) { ExpectRefused({"model.num_layers=two"}, 2, {"model.num_layers", "two"}); }

TEST_F(BadInput, OutOfRange) { ExpectRefused({"model.hidden_dropout=1.5"}, 2, {"model.hidden_dropout", "1.5"}); }

TEST_F(BadInput, EveryWrongKeyIsNamedAtOnce) {
  ExpectRefused({"model.hiden_size=64", "optimizer.lrr=1"}, 2, {"model.hiden_size", "optimizer.lrr"});
}

TEST_F(BadInput, KeyWithoutEffect) { ExpectRefused({"model.moe_per_layer_logging=true"}, 2, {"model.moe_per_layer_logging"}); }

TEST_F(BadInput, ScheduleLongerThanTheRunShowsTheCompletedLine) {
  ExpectRefused({"scheduler.lr_warmup_iters=20"}, 2, {"scheduler.lr_warmup_iters", "train.train_iters"});
  ExpectRefused({"scheduler.lr_decay_iters=400"}, 2, {"scheduler.lr_decay_iters=10"});
}

TEST_F(BadInput, GlobalBatchNotDivisible) {
  ExpectRefused({"train.global_batch_size=5"}, 2, {"train.global_batch_size", "5", "train.micro_batch_size"});
}

TEST_F(BadInput, TwoSequenceLengths) { ExpectRefused({"model.seq_length=64"}, 2, {"model.seq_length", "dataset.seq_length"}); }

TEST_F(BadInput, CheckpointLoadIsRefusedWithTheStartLine) {
  ExpectRefused({"checkpoint.load=/tmp/x"}, 2, {"checkpoint.load", "--start"});
}

TEST_F(BadInput, CheckpointSaveOutsideTheRoots) {
  ExpectRefused({"checkpoint.save=/usr/share/somewhere"}, 2, {"/usr/share/somewhere"});
}

TEST_F(BadInput, MissingCheckpoint) { ExpectRefused({"--start", "fork", "--from", "nowhere@5"}, 3, {"nowhere@5"}); }

TEST_F(BadInput, ResumeOfARunWithoutCheckpoints) {
  ExpectRefused({"--start", "resume", "--name", "never-ran"}, 3, {"never-ran"});
}

TEST_F(BadInput, MissingData) {
  ExpectRefused({"dataset.mock=false", "dataset.data_path=" + (service_.state_directory() / "no_such_data").string()}, 2,
                {"dataset.data_path", "no_such_data"});
}

TEST_F(BadInput, UnknownRecipe) {
  const CommandResult result = service_.Mbctl({"submit", "--recipe", "vanila_gpt_pretrain_config"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("vanilla_gpt_pretrain_config"));
}

TEST_F(BadInput, RecipeWhosePartsDoNotExistYet) {
  const CommandResult result = service_.Mbctl({"submit", "--recipe", "deepseek_v2_lite_pretrain_config"});
  EXPECT_THAT(result, Exited(2));
  EXPECT_THAT(result.err, HasSubstr("deepseek_v2_lite"));
}

TEST_F(BadInput, MoreRanksThanTheNodeCanEverHold) {
  ExpectRefused({"--ranks", "512", "train.global_batch_size=1024"}, 8, {"512"});
}

TEST_F(BadInput, RequestOfFiveMegabytes) {
  // Through the raw API: a command line cannot carry so much.
  v1::CreateJobRequest request;
  request.mutable_spec()->set_recipe("vanilla_gpt_pretrain_config");
  request.mutable_spec()->set_config_yaml(std::string(5 << 20, '#'));
  v1::CreateJobResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  const grpc::Status status = service_.jobs().CreateJob(&context, request, &response);
  EXPECT_TRUE(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
              status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED)
      << status.error_code() << " " << status.error_message();
  EXPECT_THAT(service_.Mbctl({"ps"}), Exited(0)) << "other clients go on";
}

TEST_F(BadInput, ConfigFileOfFiveMegabytesThroughMbctl) {
  const auto path = service_.directory() / "big.yaml";
  WriteFile(path, std::string(5 << 20, '#'));
  ExpectRefused({"--config", path}, 2, {"4 MiB"});
}

TEST_F(BadInput, UnknownOptionAndVerb) {
  EXPECT_THAT(service_.Mbctl({"submit", "--no-such-option"}), Exited(2));
  EXPECT_THAT(service_.Mbctl({"frobnicate"}), Exited(2));
}

TEST_F(BadInput, NoServer) {
  SpawnOptions options = service_.MbctlOptions();
  options.environment["MBCTL_SERVER"] = "127.0.0.1:" + std::to_string(FreePort());
  const CommandResult result = RunCommand({Program("mbctl"), "ps"}, options, Seconds(60));
  EXPECT_THAT(result, Exited(7));
  EXPECT_THAT(result.err, HasSubstr(options.environment["MBCTL_SERVER"]));
}

}  // namespace
}  // namespace mbridge::e2e
