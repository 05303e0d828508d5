// The commands that look: ps, get, metrics, logs, ckpt, compare, translate, recipe.
#include <nlohmann/json.hpp>

#include "client/mbctl/testing/command_fixture.h"

namespace mbridge::mbctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(Mbctl, UnknownJobIsThreeEverywhere) {
  KnowJob();
  fake_.Start();
  for (const char* verb : {"get", "describe", "logs", "metrics", "cancel", "follow", "wait", "resume"}) {
    const Result result = Run({verb, "j-000"});
    EXPECT_EQ(result.code, 3) << verb;
    EXPECT_THAT(result.err, AllOf(HasSubstr("j-000"), HasSubstr("mbctl ps -a"))) << verb;
  }
}

TEST_F(Mbctl, PsGetDescribe) {
  KnowJob();
  fake_.Start();
  EXPECT_THAT(Run({"ps"}).out, AllOf(HasSubstr("JOB"), HasSubstr("j-abc")));
  EXPECT_EQ(Run({"ps", "-o", "name"}).out, "j-abc\n");
  EXPECT_THAT(Run({"describe", "run-1"}).out,
              AllOf(HasSubstr("COMPLETED"), HasSubstr("train.train_iters=10"), HasSubstr("attempt 1")));
  EXPECT_EQ(nlohmann::json::parse(Run({"get", "j-abc", "-o", "json"}).out)["runName"], "run-1");
  EXPECT_THAT(Run({"get", "j-abc", "-o", "yaml"}).out, HasSubstr("runName: run-1\n"));
}

TEST_F(Mbctl, MetricsTableJsonAndPlot) {
  KnowJob();
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  const Result table = Run({"metrics", "j-abc"});
  EXPECT_THAT(table.out, AllOf(HasSubstr("LM LOSS"), HasSubstr("10.420700"), HasSubstr("NaN"), HasSubstr("validation")));
  std::istringstream lines(Run({"metrics", "j-abc", "-o", "json"}).out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) EXPECT_TRUE(nlohmann::json::parse(line).contains("lmLoss"));
  EXPECT_EQ(count, 3);
  EXPECT_THAT(Run({"metrics", "j-abc", "--plot"}).out, AllOf(HasSubstr("loss of j-abc"), HasSubstr("*")));
  const Result follow = Run({"metrics", "j-abc", "-f"});
  EXPECT_EQ(follow.code, 0);
  EXPECT_THAT(follow.out, HasSubstr("10.420700"));
}

TEST_F(Mbctl, LogsAreTheBytesOfTheRank) {
  KnowJob();
  fake_.jobs.logs = [](grpc::ServerContext*, const v1::TailLogsRequest& request, auto* writer) {
    EXPECT_EQ(request.rank(), 3);
    v1::TailLogsResponse message;
    message.set_data("line\n");
    message.set_attempt(1);
    if (request.follow()) *message.mutable_end() = End(v1::JOB_STATE_FAILED, v1::REASON_RANK_CRASHED);
    writer->Write(message);
    return grpc::Status::OK;
  };
  fake_.Start();
  const Result result = Run({"logs", "j-abc", "--rank", "3"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "line\n");
  EXPECT_EQ(Run({"logs", "-f", "j-abc", "--rank", "3"}).code, 1);
}

TEST_F(Mbctl, DamageFoundByVerifyIsNine) {
  fake_.checkpoints.verify = [](const auto&, auto*) {
    return ToGrpc(MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT, "shard-0.bin: checksum differs"));
  };
  fake_.Start();
  const Result result = Run({"ckpt", "verify", "run-1@5"});
  EXPECT_EQ(result.code, 9);
  EXPECT_THAT(result.err, HasSubstr("shard-0.bin"));
  const Result removed = Run({"ckpt", "rm", "run-1@5"});  // No terminal to ask on.
  EXPECT_EQ(removed.code, 2);
  EXPECT_THAT(removed.err, HasSubstr("--yes"));
}

TEST_F(Mbctl, CompareWithTheOracle) {
  const std::string oracle = std::string(MB_SOURCE_DIR) + "/tests/data/mlm/losses.json";
  const Result same = Run({"compare", oracle + ":seed1_default_dropout", oracle + ":seed1_default_dropout"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, AllOf(HasSubstr("ITERATION"), HasSubstr("10.420714"), HasSubstr("verdict: equal (10 iterations")));
  const Result other = Run({"compare", oracle + ":seed1", oracle + ":seed1_default_dropout", "-o", "json"});
  EXPECT_EQ(other.code, 1);
  EXPECT_EQ(nlohmann::json::parse(other.out)["verdict"], "DIFFERENT");
  EXPECT_EQ(
      Run({"compare", oracle + ":seed1", oracle + ":seed1_default_dropout", "--tolerance", "1", "--grad-norm-tolerance", "1"})
          .code,
      0);
  const Result unknown = Run({"compare", oracle, oracle + ":seed1"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("seed1_dp2"));
  EXPECT_EQ(Run({"compare", "no/such.log", oracle + ":seed1"}).code, 3);
}

TEST_F(Mbctl, TranslateNamesAMistypedFlagInEveryQuoting) {
  const std::vector<std::vector<std::string>> lines = {{"--num-layrs", "2"},
                                                       {"--", "--num-layrs", "2"},
                                                       {"--num-layrs=2"},
                                                       {"--num_layrs=2"},
                                                       {"--num-layrs 2"},
                                                       {"--", "--num-layrs 2 --hidden-size 256"},
                                                       {"--hidden-size 256", "--num-layrs 2"},
                                                       {"torchrun pretrain_gpt.py --num-layrs 2"},
                                                       {"--", "pretrain_gpt.py", "--num-layrs", "2"}};
  for (std::vector<std::string> words : lines) {
    words.insert(words.begin(), "translate");
    const Result result = Run(words);
    EXPECT_EQ(result.code, 2) << words.back();
    EXPECT_THAT(result.err, AllOf(HasSubstr("UNKNOWN_KEY"), HasSubstr("did you mean --num-layers?"))) << words.back();
  }
}

TEST_F(Mbctl, TranslateBothWays) {
  const Result forth = Run({"translate",
                            "--num-layers",
                            "2",
                            "--hidden-size",
                            "256",
                            "--num-attention-heads",
                            "4",
                            "--seq-length",
                            "512",
                            "--max-position-embeddings",
                            "512",
                            "--micro-batch-size",
                            "4",
                            "--global-batch-size",
                            "32",
                            "--train-iters",
                            "10",
                            "--lr",
                            "3e-4",
                            "--bf16",
                            "--mock-data",
                            "--tokenizer-type",
                            "NullTokenizer",
                            "--vocab-size",
                            "32000"});
  ASSERT_EQ(forth.code, 0) << forth.err;
  EXPECT_THAT(forth.out, AllOf(HasSubstr("mbctl submit --recipe"), HasSubstr("model.num_layers=2")));
  const Result unknown = Run({"translate", "--num-layerz", "2"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("--num-layers"));
  const Result back = Run({"translate", "--reverse", "--recipe", "vanilla_gpt_pretrain_config", "model.num_layers=3"});
  ASSERT_EQ(back.code, 0) << back.err;
  EXPECT_THAT(back.out, HasSubstr("--num-layers 3"));
  EXPECT_EQ(Run({"translate"}).code, 2);
}

TEST_F(Mbctl, RecipeKeysAndLocalRecipes) {
  const Result keys = Run({"recipe", "keys", "hidden_size"});
  EXPECT_EQ(keys.code, 0);
  EXPECT_THAT(keys.out, HasSubstr("model.hidden_size"));
  EXPECT_EQ(Run({"recipe", "keys", "zzz-no-such"}).code, 3);
  EXPECT_THAT(Run({"recipe", "ls", "--local", "-o", "name"}).out, HasSubstr("vanilla_gpt_pretrain_config\n"));
  const Result show = Run({"recipe", "show", "--local", "vanilla_gpt_pretrain_config", "model.num_layers=2"});
  EXPECT_EQ(show.code, 0) << show.err;
  EXPECT_THAT(show.out, ::testing::ContainsRegex("model.num_layers +2 +override"));
  EXPECT_EQ(Run({"recipe", "show", "--local", "vanila_gpt_pretrain_config"}).code, 2);
}

}  // namespace
}  // namespace mbridge::mbctl
