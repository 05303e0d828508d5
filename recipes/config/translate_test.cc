#include "recipes/config/translate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "mbridge/v1/config.pb.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/docs_table.h"
#include "recipes/config/resolve.h"
#include "recipes/config/text_form.h"

namespace mbridge::recipes {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

std::string ReadText(const std::string& path) {
  std::ifstream file(std::string(MB_SOURCE_DIR) + "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

absl::StatusOr<v1::ResolvedConfig> ResolveTranslation(const Translation& translation, bool trainable = true) {
  ResolveRequest request;
  request.recipe = translation.recipe;
  request.overrides = translation.overrides;
  request.ranks = translation.ranks;
  request.require_trainable = trainable;
  return Resolve(request);
}

// Arguments of a recorded Megatron-LM run.
std::string RecordedRun(const std::string& name) {
  const nlohmann::json runs = nlohmann::json::parse(ReadText("tests/data/mlm/losses.json"));
  return runs["runs"][name]["args"].get<std::string>() + " " + runs["common_args"].get<std::string>();
}

std::string Described(const absl::Status& status, const std::string& flag) {
  for (const FieldViolation& violation : FieldViolationsOf(status)) {
    if (violation.field == flag) return violation.description;
  }
  return "";
}

TEST(Translate, RecordedRunBecomesTheParityRecipe) {
  auto translation =
      TranslateFromMegatron("CUDA_DEVICE_MAX_CONNECTIONS=1 python3 -m torch.distributed.run --nproc_per_node=2 pretrain_gpt.py " +
                            RecordedRun("seed1_default_dropout"));
  ASSERT_TRUE(translation.ok()) << translation.status();
  EXPECT_EQ(translation->recipe, "vanilla_gpt_megatron_lm_config");
  EXPECT_EQ(translation->ranks, 2);
  EXPECT_THAT(translation->overrides, Contains("mixed_precision=bf16_mixed"));
  EXPECT_THAT(translation->overrides, Contains("optimizer.min_lr=3e-05"));
  auto resolved = ResolveTranslation(*translation);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const v1::ConfigContainer& config = resolved->config();
  EXPECT_EQ(config.train().train_iters(), 10);
  EXPECT_EQ(config.scheduler().lr_decay_iters(), 10);
  EXPECT_EQ(config.scheduler().lr_warmup_iters(), 0);
  EXPECT_EQ(config.scheduler().lr_decay_style(), "linear");
  EXPECT_DOUBLE_EQ(config.optimizer().weight_decay(), 0.01);
  EXPECT_TRUE(config.model().bias_activation_fusion());
  EXPECT_FALSE(config.model().cross_entropy_loss_fusion());
  EXPECT_DOUBLE_EQ(config.model().hidden_dropout(), 0.1);
  EXPECT_EQ(config.validation().eval_iters(), 2);
  EXPECT_EQ(config.tokenizer().vocab_size(), 32000);
  EXPECT_FALSE(config.checkpoint().has_save_interval());
}

TEST(Translate, EveryRecordedRunResolves) {
  for (const char* name : {"seed1", "seed1_default_dropout", "seed1_fp32", "seed1_dp2", "seed1_softmax_fp32", "seed1_mbs1",
                           "seed2_dp2_distopt", "seed2_tp2_sp", "seed2_pp2", "llama_tiny", "moe_tiny", "moe_tiny_ep2"}) {
    auto translation = TranslateFromMegatron(RecordedRun(name));
    ASSERT_TRUE(translation.ok()) << name << ": " << translation.status();
    auto resolved = ResolveTranslation(*translation, /*trainable=*/false);
    ASSERT_TRUE(resolved.ok()) << name << ": " << resolved.status();
    const bool planned = std::string(name).find("ep2") != std::string::npos || std::string(name).find("pp2") != std::string::npos;
    EXPECT_EQ(ResolveTranslation(*translation).ok(), !planned) << name;
  }
  auto fp32 = TranslateFromMegatron(RecordedRun("seed1_fp32"));
  EXPECT_THAT(fp32->overrides, Contains("mixed_precision=fp32"));
  auto seed2 = ResolveTranslation(*TranslateFromMegatron(RecordedRun("seed2_dp2_distopt")));
  EXPECT_DOUBLE_EQ(seed2->config().optimizer().min_lr(), 0.0);  // Megatron-LM's default, not the recipe's.
  EXPECT_TRUE(seed2->config().optimizer().use_distributed_optimizer());
}

TEST(Translate, ThereAndBackGivesTheSameHash) {
  const std::string line = RecordedRun("seed1");
  for (const std::string& extra : std::vector<std::string>{
           "", " --no-bias-gelu-fusion --no-bias-dropout-fusion --cross-entropy-loss-fusion",
           " --lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 2",
           " --use-distributed-optimizer --no-check-for-nan-in-loss-and-grad --clip-grad 0.5 --weight-decay 0.1",
           " --start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear",
           " --save-interval 5 --no-save-optim --log-params-norm --exit-interval 5"}) {
    auto translation = TranslateFromMegatron(line + extra);
    ASSERT_TRUE(translation.ok()) << extra << translation.status();
    auto resolved = ResolveTranslation(*translation);
    ASSERT_TRUE(resolved.ok()) << extra << resolved.status();
    const MegatronLine back = TranslateToMegatron(*resolved);
    auto again = TranslateFromMegatron(back.CommandLine());
    ASSERT_TRUE(again.ok()) << back.CommandLine() << "\n" << again.status();
    auto second = ResolveTranslation(*again);
    ASSERT_TRUE(second.ok()) << back.CommandLine() << "\n" << second.status();
    EXPECT_EQ(ToYaml(*second), ToYaml(*resolved)) << back.CommandLine();
  }
}

TEST(Translate, BridgeRecipeToMegatronAndBack) {
  ResolveRequest request;
  request.recipe = "vanilla_gpt_pretrain_config";
  request.overrides = {"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4", "dataset.seq_length=512",
                       "train.train_iters=1000"};
  auto resolved = Resolve(request);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const MegatronLine back = TranslateToMegatron(*resolved);
  EXPECT_THAT(back.CommandLine(), HasSubstr("--lr-decay-style cosine"));
  EXPECT_THAT(back.CommandLine(), HasSubstr("--adam-beta2 0.95"));
  EXPECT_THAT(back.CommandLine(), HasSubstr("--weight-decay 0.033"));
  EXPECT_THAT(back.CommandLine(), HasSubstr("--no-bias-gelu-fusion"));
  auto again = TranslateFromMegatron(back.CommandLine());
  ASSERT_TRUE(again.ok()) << again.status();
  auto second = ResolveTranslation(*again);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->config_hash(), resolved->config_hash()) << ToYaml(*second) << ToYaml(*resolved);
}

TEST(Translate, UnknownFlagsAreErrorsWithSuggestions) {
  auto translation = TranslateFromMegatron(RecordedRun("seed1") + " --hiden-dropout 0.2 --frobnicate");
  ASSERT_FALSE(translation.ok());
  EXPECT_EQ(ReasonOf(translation.status()), v1::REASON_UNKNOWN_KEY);
  EXPECT_THAT(Described(translation.status(), "--hiden-dropout"), HasSubstr("--hidden-dropout"));
  EXPECT_NE(Described(translation.status(), "--frobnicate"), "");
}

TEST(Translate, WrongValuesNameTheFlag) {
  const std::string run = RecordedRun("seed1");
  EXPECT_THAT(Described(TranslateFromMegatron(run + " --adam-beta1 many").status(), "--adam-beta1"), HasSubstr("expects float"));
  EXPECT_THAT(Described(TranslateFromMegatron(run + " --adam-beta1").status(), "--adam-beta1"), HasSubstr("needs a value"));
  EXPECT_THAT(Described(TranslateFromMegatron(run + " --fp16").status(), "--fp16"), HasSubstr("exclude"));
  EXPECT_THAT(Described(TranslateFromMegatron(run + " --seed 5").status(), "--seed"), HasSubstr("twice"));
  EXPECT_THAT(Described(TranslateFromMegatron(run + " --swiglu=1").status(), "--swiglu"), HasSubstr("takes no value"));
  EXPECT_THAT(Described(TranslateFromMegatron("stray " + run).status(), "stray"), HasSubstr("not a flag"));
  EXPECT_THAT(Described(TranslateFromMegatron("--lr 'x").status(), "arguments"), HasSubstr("closing"));
  EXPECT_THAT(Described(TranslateFromMegatron("--bf16").status(), "--num-layers"), HasSubstr("missing"));
  std::string longer = run;
  longer.replace(longer.find("--max-position-embeddings 512"), 29, "--max-position-embeddings 1024");
  EXPECT_THAT(Described(TranslateFromMegatron(longer).status(), "--max-position-embeddings"), HasSubstr("--seq-length is 512"));
}

TEST(Translate, SaysWhatItLeavesOutAndCorrects) {
  std::string run = RecordedRun("seed1");
  run.replace(run.find("--bf16"), 6, "--fp16");
  auto translation =
      TranslateFromMegatron(run + " --load /ckpt --num-workers 4 --override-opt_param-scheduler --weight-decay 0.1");
  ASSERT_TRUE(translation.ok()) << translation.status();
  EXPECT_THAT(translation->overrides, Contains("mixed_precision=fp16_mixed"));
  EXPECT_THAT(translation->notes, Contains(HasSubstr("--start fork --from ID")));
  EXPECT_THAT(translation->notes, Contains(HasSubstr("--num-workers: left out")));
  EXPECT_THAT(translation->notes, Contains(HasSubstr("16-mixed")));
  EXPECT_THAT(translation->notes, Contains(HasSubstr("0.033")));
  EXPECT_TRUE(ResolveTranslation(*translation).ok());
}

TEST(Translate, SeedDataBatchAndPatterns) {
  std::string run = RecordedRun("seed1");
  run.replace(run.find("--seed 1234"), 11, "--seed 77");
  run.replace(run.find("--mock-data"), 11, "--data-path 0.3 /data/a 0.7 /data/b");
  run.replace(run.find("--global-batch-size 32"), 22, "");
  auto translation = TranslateFromMegatron(run);
  ASSERT_TRUE(translation.ok()) << translation.status();
  auto resolved = ResolveTranslation(*translation);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->config().rng().seed(), 77);
  EXPECT_EQ(resolved->config().dataset().random_seed(), 77);
  EXPECT_EQ(resolved->config().dataset().split(), "969, 30, 1");
  EXPECT_EQ(resolved->config().dataset().blend().weights_size(), 2);
  EXPECT_EQ(resolved->config().train().global_batch_size(), 4);
  auto moe = TranslateFromMegatron(RecordedRun("moe_tiny") + " --moe-layer-freq '([0]*1+[1]*3)'");
  ASSERT_TRUE(moe.ok()) << moe.status();
  EXPECT_THAT(moe->overrides, Contains("model.moe_layer_freq=[0,1,1,1]"));
}

TEST(Translate, ShellWords) {
  EXPECT_THAT(*SplitShellWords("a 'b c' \"d \\\" e\" f\\ g \\\n h # rest\ni"),
              ::testing::ElementsAre("a", "b c", "d \" e", "f g", "h", "i"));
  EXPECT_THAT(*SplitShellWords("'' x"), ::testing::ElementsAre("", "x"));
  EXPECT_EQ(ShellQuote("a'b"), "'a'\\''b'");
  EXPECT_THAT(*SplitShellWords(ShellQuote("it's [a b]")), ::testing::ElementsAre("it's [a b]"));
}

TEST(Docs, TableOfTheManualIsTheGeneratedOne) {
  const std::string page = ReadText("docs/megatron-lm.md");
  const std::string begin = "<!-- flags: begin, made by build/bin/mb_schema_docs flags docs/megatron-lm.md -->\n\n",
                    end = "<!-- flags: end -->";
  const size_t from = page.find(begin), to = page.find(end);
  ASSERT_NE(from, std::string::npos);
  ASSERT_NE(to, std::string::npos);
  EXPECT_TRUE(page.substr(from + begin.size(), to - from - begin.size()) == FlagTableMarkdown())
      << "docs/megatron-lm.md differs from the schema; run: build/bin/mb_schema_docs flags docs/megatron-lm.md";
}

}  // namespace
}  // namespace mbridge::recipes
