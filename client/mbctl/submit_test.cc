// submit, resume, fork: what is sent, what is said.
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "client/mbctl/submit.h"
#include "client/mbctl/testing/command_fixture.h"
#include "recipes/config/resolve.h"

namespace mbridge::mbctl {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Mbctl, SubmitSendsWhatWasAskedFor) {
  AcceptJobs();
  fake_.Start();
  const Result result = Run({"submit",
                             "--recipe",
                             "vanilla_gpt_pretrain_config",
                             "model.num_layers=2",
                             "--ranks",
                             "2",
                             "--device",
                             "cpu",
                             "--name",
                             "mine",
                             "+optimizer.lr=3e-4",
                             "--label",
                             "team=a",
                             "--label",
                             "x=y=z",
                             "--priority",
                             "70",
                             "--max-restarts",
                             "-1",
                             "--time-limit",
                             "2h"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "j-abc\n");
  EXPECT_THAT(result.err, AllOf(HasSubstr("j-abc"), HasSubstr("run-1"), HasSubstr("mbctl follow j-abc")));
  const v1::JobSpec& spec = request_.spec();
  EXPECT_EQ(spec.recipe(), "vanilla_gpt_pretrain_config");
  EXPECT_THAT(spec.overrides(), ElementsAre("model.num_layers=2", "+optimizer.lr=3e-4"));
  EXPECT_EQ(spec.ranks(), 2);
  EXPECT_EQ(spec.device(), v1::DEVICE_CPU);
  EXPECT_EQ(spec.run_name(), "mine");
  EXPECT_EQ(spec.labels().at("x"), "y=z");
  EXPECT_EQ(spec.priority(), 70);
  EXPECT_EQ(spec.max_restarts(), -1);
  EXPECT_EQ(spec.wall_time_limit_seconds(), 7200);
  EXPECT_EQ(spec.start().mode(), v1::START_MODE_FRESH);
  EXPECT_EQ(request_.request_id().size(), 36u);
  EXPECT_FALSE(request_.validate_only());
}

TEST_F(Mbctl, SubmitOutputs) {
  AcceptJobs();
  fake_.Start();
  EXPECT_EQ(Run({"submit", "-r", "x", "-o", "name"}).out, "j-abc\n");
  EXPECT_EQ(Run({"-o", "name", "submit", "-r", "x"}).out, "j-abc\n");
  const auto json = nlohmann::json::parse(Run({"submit", "-r", "x", "-o", "json"}).out);
  EXPECT_EQ(json["jobId"], "j-abc");
  EXPECT_EQ(Run({"submit", "-r", "x", "-q"}).err, "");
}

TEST_F(Mbctl, SubmitStartsExplicitly) {
  AcceptJobs();
  fake_.Start();
  ASSERT_EQ(Run({"submit", "-r", "x", "--start", "fork", "--from", "base@5", "--weights-only"}).code, 0);
  EXPECT_EQ(request_.spec().start().mode(), v1::START_MODE_FORK);
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "base@5");
  EXPECT_TRUE(request_.spec().start().weights_only());
  EXPECT_EQ(Run({"submit", "-r", "x", "--from", "base@5"}).code, 2);
  EXPECT_EQ(Run({"submit", "-r", "x", "--start", "fork"}).code, 2);
  EXPECT_EQ(Run({"submit", "-r", "x", "--start", "resume", "--weights-only"}).code, 2);
  EXPECT_EQ(Run({"submit", "-r", "x", "--start", "again"}).code, 2);
}

TEST_F(Mbctl, RefusalShowsEachFieldReasonAndNextStep) {
  fake_.jobs.create = [](const auto&, auto*) {
    return ToGrpc(InvalidFields(v1::REASON_UNKNOWN_KEY, {{"model.hiden_size", "unknown key; did you mean model.hidden_size?"},
                                                         {"train.iters", "unknown key"}}));
  };
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "model.hiden_size=1", "train.iters=2"});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, AllOf(HasSubstr("2 errors"), HasSubstr("\n  model.hiden_size: unknown key; did you mean"),
                                HasSubstr("\n  train.iters: unknown key\n"), HasSubstr("reason: UNKNOWN_KEY"),
                                HasSubstr("next: The key does not exist; `mbctl recipe keys PATTERN`")));
}

TEST_F(Mbctl, ARefusalForMemoryPointsToWhatFits) {
  const std::string fits =
      "the GPUs of this node: a rank needs about 9 MiB. What fits:\n  train.micro_batch_size=1 (1 MiB a rank)";
  std::string description = fits;
  fake_.jobs.create = [&](const auto&, auto*) {
    return ToGrpc(InvalidFields(v1::REASON_OUT_OF_MEMORY, {{"train.micro_batch_size", description}}));
  };
  fake_.Start();
  const Result result = Run({"submit", "-r", "x"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr(fits + "\n"), HasSubstr("reason: OUT_OF_MEMORY"),
                                HasSubstr("next: Nothing was started; take one of the lines above.")));
  description = "a tensor needs 9 bytes of memory";
  EXPECT_THAT(Run({"submit", "-r", "x"}).err, testing::Not(HasSubstr("lines above")));
}

TEST_F(Mbctl, EveryRefusalExitsWithItsReasonsCode) {
  fake_.Start();
  const auto* reasons = v1::Reason_descriptor();
  for (int i = 0; i < reasons->value_count(); ++i) {
    const auto reason = static_cast<v1::Reason>(reasons->value(i)->number());
    const int code = InfoOf(reason).exit_code();
    // SERVICE_STOPPING comes with UNAVAILABLE, which is repeated; its code is tested in client/lib.
    // A refused call never exits with 1, a failed job's code.
    if (code <= 1 || reason == v1::REASON_SERVICE_STOPPING) continue;
    fake_.jobs.create = [reason](const auto&, auto*) {
      return ToGrpc(MakeStatus(absl::StatusCode::kFailedPrecondition, reason, "refused"));
    };
    const Result result = Run({"submit", "-r", "x"});
    EXPECT_EQ(result.code, code) << ReasonName(reason);
    EXPECT_THAT(result.err, HasSubstr("reason: " + ReasonName(reason)));
  }
}

TEST_F(Mbctl, NoCoordinatorSaysWhereAndHowToStartOne) {
  const Result result = Run({"ps"});
  EXPECT_EQ(result.code, 7);
  EXPECT_THAT(result.err, AllOf(HasSubstr(fake_.address()), HasSubstr("mbcoordinator --state-dir")));
}

TEST_F(Mbctl, UnreachableSubmitNamesTheRequestId) {
  const Result result = Run({"submit", "-r", "x", "--request-id", "11111111-2222-4333-8444-555555555555"});
  EXPECT_EQ(result.code, 7);
  EXPECT_THAT(result.err, HasSubstr("--request-id 11111111-2222-4333-8444-555555555555"));
}

TEST_F(Mbctl, ConfigFileOfFiveMegabytes) {
  const std::string path = ::testing::TempDir() + "big.yaml";
  std::ofstream(path) << std::string(5 << 20, '#');
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--config", path});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("REQUEST_TOO_LARGE"), HasSubstr("4 MiB")));
  std::remove(path.c_str());
  EXPECT_EQ(Run({"submit", "-r", "x", "--config", "/no/such.yaml"}).code, 2);
}

TEST_F(Mbctl, DryRunPrintsOriginsChangesAndMemory) {
  fake_.jobs.create = [](const v1::CreateJobRequest& request, v1::CreateJobResponse* response) {
    EXPECT_TRUE(request.validate_only());
    auto* resolved = response->mutable_job()->mutable_resolved();
    resolved->set_recipe("vanilla_gpt_pretrain_config");
    resolved->set_ranks(2);
    const std::tuple<const char*, const char*, v1::Origin> values[] = {
        {"model.hidden_size", "32", v1::ORIGIN_OVERRIDE},    {"model.kv_channels", "16", v1::ORIGIN_DERIVED},
        {"optimizer.adam_beta2", "0.95", v1::ORIGIN_RECIPE}, {"optimizer.adam_eps", "1e-08", v1::ORIGIN_DEFAULT},
        {"train.train_iters", "10", v1::ORIGIN_OVERRIDE},    {"train.global_batch_size", "32", v1::ORIGIN_OVERRIDE},
        {"dataset.seq_length", "512", v1::ORIGIN_OVERRIDE}};
    for (const auto& [key, value, origin] : values) {
      auto* entry = resolved->add_values();
      entry->set_key(key);
      entry->set_value(value);
      entry->set_origin(origin);
    }
    auto* change = resolved->add_changes();
    change->set_key("model.seq_length");
    change->set_old_value("1024");
    change->set_new_value("512");
    change->set_why("dataset.seq_length was set");
    resolved->mutable_per_rank()->set_optimizer_bytes(3 << 20);
    resolved->add_warnings("note: train: 90 documents");
    resolved->add_warnings("odd value");
    return grpc::Status::OK;
  };
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--dry-run"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, ::testing::ContainsRegex("model.hidden_size +32 +override"));
  EXPECT_THAT(result.out, ::testing::ContainsRegex("optimizer.adam_beta2 +0.95 +recipe"));
  EXPECT_THAT(result.out, AllOf(HasSubstr("model.seq_length: 1024 -> 512 (dataset.seq_length was set)"), HasSubstr("weights"),
                                HasSubstr("gradients"), HasSubstr("activations"), HasSubstr("parameters"),
                                HasSubstr("10 x 32 samples x 512 tokens"), Not(HasSubstr("adam_eps"))));
  EXPECT_THAT(result.out, ::testing::ContainsRegex("optimizer +3.0 MiB"));
  EXPECT_THAT(result.out, HasSubstr("\nnotes\n  train: 90 documents\n\nwarnings\n  odd value\n"));
  EXPECT_THAT(Run({"submit", "-r", "x", "--dry-run", "--all"}).out, HasSubstr("adam_eps"));
  EXPECT_EQ(nlohmann::json::parse(Run({"submit", "-r", "x", "--dry-run", "-o", "json"}).out)["ranks"], 2);
}

TEST_F(Mbctl, LocalDryRunShowsWhatASubmitRefuses) {
  for (const char* recipe : {"llama32_1b", "llama3_8b", "qwen3_8b", "deepseek_v2_lite"}) {
    const Result result = Run({"submit", "-r", std::string(recipe) + "_pretrain_config", "--dry-run", "--local"});
    EXPECT_EQ(result.code, 0) << recipe << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("model.num_layers"), HasSubstr("parameters")));
    recipes::ResolveRequest request;
    request.recipe = std::string(recipe) + "_pretrain_config";
    const bool trains = recipes::Resolve(request).ok();
    EXPECT_EQ(result.out.find("a submit is refused: recipe") == std::string::npos, trains) << recipe;
  }
  const Result wrong = Run({"submit", "-r", "qwen3_8b_pretrain_config", "--dry-run", "--local", "model.hiden_size=2"});
  EXPECT_EQ(wrong.code, 2) << "all else is checked";
}

TEST_F(Mbctl, LocalDryRunNamesPartsWithoutCudaOperators) {
  const auto run = [&](const char* device) {
    return Run({"submit", "-r", "vanilla_gpt", "--dry-run", "--local", "--device", device, "model.num_layers=2",
                "model.hidden_size=64", "model.num_attention_heads=2", "model.is_hybrid_model=true",
                "model.hybrid_layer_pattern=M*", "model.mamba_state_dim=8", "model.mamba_head_dim=8", "model.mamba_num_groups=2",
                "model.normalization=RMSNorm", "model.add_bias_linear=false"});
  };
  const char* const kSentence =
      "a submit is refused: a Mamba-2 mixer (M or P in model.hybrid_layer_pattern) has no CUDA operator in this version; "
      "--device cpu trains it";
  const Result gpu = run("cuda");
  EXPECT_EQ(gpu.code, 0) << gpu.err;
  EXPECT_THAT(gpu.out, AllOf(HasSubstr(kSentence), HasSubstr("model.hybrid_layer_pattern")));
  EXPECT_THAT(run("cpu").out, Not(HasSubstr("CUDA operator")));
}

TEST_F(Mbctl, LocalDryRunCanBeFedBack) {
  const std::vector<std::string> line = {"submit",
                                         "-r",
                                         "vanilla_gpt_pretrain_config",
                                         "--dry-run",
                                         "--local",
                                         "model.num_layers=2",
                                         "model.hidden_size=64",
                                         "model.num_attention_heads=2",
                                         "train.train_iters=10",
                                         "scheduler.lr_decay_iters=10",
                                         "scheduler.lr_warmup_iters=1"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = line;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Result yaml = Run(with({"-o", "yaml"}));
  ASSERT_EQ(yaml.code, 0) << yaml.err;
  const std::string path = ::testing::TempDir() + "resolved.yaml";
  std::ofstream(path) << yaml.out;
  const Result first = Run(with({"-o", "json"}));
  const Result again =
      Run({"submit", "-r", "vanilla_gpt_pretrain_config", "--config", path, "--dry-run", "--local", "-o", "json"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(nlohmann::json::parse(first.out)["configHash"], nlohmann::json::parse(again.out)["configHash"]);
  std::remove(path.c_str());
}

TEST_F(Mbctl, ResumeTakesTheSpecAndReplacesOverrides) {
  AcceptJobs();
  KnowJob();
  fake_.Start();
  ASSERT_EQ(Run({"resume", "run-1", "--from", "run-1@5", "train.train_iters=20"}).code, 0);
  const v1::JobSpec& spec = request_.spec();
  EXPECT_EQ(spec.run_name(), "run-1");
  EXPECT_EQ(spec.start().mode(), v1::START_MODE_RESUME);
  EXPECT_EQ(spec.start().checkpoint_id(), "run-1@5");
  EXPECT_EQ(spec.ranks(), 2);
  EXPECT_THAT(spec.overrides(), ElementsAre("optimizer.lr=3e-4", "train.train_iters=20"));
}

TEST_F(Mbctl, ForkFindsTheCheckpointOfAStep) {
  AcceptJobs();
  KnowJob();
  fake_.checkpoints.list = [](const v1::ListCheckpointsRequest& request, v1::ListCheckpointsResponse* response) {
    EXPECT_EQ(request.run_name(), "run-1");
    for (int step : {5, 10, 15}) {
      auto* checkpoint = response->add_checkpoints();
      checkpoint->set_checkpoint_id("run-1@" + std::to_string(step));
      checkpoint->set_step(step);
      checkpoint->set_job_id("j-abc");
      checkpoint->set_state(step == 15 ? v1::CHECKPOINT_STATE_CORRUPT : v1::CHECKPOINT_STATE_COMMITTED);
    }
    return grpc::Status::OK;
  };
  fake_.checkpoints.get = [](const v1::GetCheckpointRequest& request, v1::GetCheckpointResponse* response) {
    if (request.checkpoint_id() != "run-1@5") {
      return ToGrpc(
          MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND, "no checkpoint " + request.checkpoint_id()));
    }
    response->mutable_checkpoint()->set_checkpoint_id("run-1@5");
    response->mutable_checkpoint()->set_job_id("j-abc");
    return grpc::Status::OK;
  };
  fake_.Start();
  ASSERT_EQ(Run({"fork", "j-abc@10", "optimizer.lr=1e-4", "--name", "child"}).code, 0);
  EXPECT_EQ(request_.spec().start().mode(), v1::START_MODE_FORK);
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "run-1@10");
  EXPECT_EQ(request_.spec().run_name(), "child");
  EXPECT_THAT(request_.spec().overrides(), ElementsAre("train.train_iters=10", "optimizer.lr=1e-4"));
  ASSERT_EQ(Run({"fork", "run-1@5"}).code, 0);
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "run-1@5");
  EXPECT_EQ(request_.spec().run_name(), "");
  const Result newest = Run({"fork", "j-abc"});  // The corrupt one is never the newest, and named.
  ASSERT_EQ(newest.code, 0);
  EXPECT_THAT(newest.err, HasSubstr("warning: run-1@15 is newer, but corrupt"));
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "run-1@10");
  const Result missing = Run({"fork", "j-abc@7"});
  EXPECT_EQ(missing.code, 3);
  EXPECT_THAT(missing.err, HasSubstr("run-1@5, run-1@10"));
  EXPECT_EQ(Run({"fork", "nobody@7"}).code, 3);
}

TEST(MergeOverrides, LaterLinesReplaceTheSameKey) {
  EXPECT_THAT(MergeOverrides({"a.b=1", "+c=2", "d=3"}, {"c=5", "++a.b=7"}), ElementsAre("d=3", "c=5", "++a.b=7"));
  EXPECT_THAT(MergeOverrides({"model.transformer.num_layers=4", "model.x=1"}, {"model.num_layers=2", "model.transformer.x=3"}),
              ElementsAre("model.num_layers=2", "model.transformer.x=3"));
  EXPECT_THAT(MergeOverrides({"train.eval_iters=4", "mixed_precision=bf16_mixed"},
                             {"validation.eval_iters=2", "mixed_precision.preset=fp16_mixed"}),
              ElementsAre("validation.eval_iters=2", "mixed_precision.preset=fp16_mixed"));
}

}  // namespace
}  // namespace mbridge::mbctl
