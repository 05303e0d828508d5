#include "recipes/config/resolve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "mbridge/v1/options.pb.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/estimate.h"
#include "recipes/config/recipe_store.h"
#include "recipes/config/resolve_test_support.h"
#include "recipes/config/schema.h"
#include "recipes/config/text_form.h"

namespace mbridge::recipes {
namespace {

using ::testing::HasSubstr;

TEST(Resolve, DocumentedCommandResolves) {
  auto resolved = Submit(CorrelationRun());
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const v1::ConfigContainer& config = resolved->config();
  EXPECT_EQ(config.model().num_query_groups(), 4);
  EXPECT_EQ(config.model().kv_channels(), 64);
  EXPECT_EQ(config.model().vocab_size(), 32000);
  EXPECT_TRUE(config.model().bf16());
  EXPECT_TRUE(config.optimizer().bf16());
  EXPECT_TRUE(config.dataset().mock());
  EXPECT_EQ(config.dataset().split(), "1,1,1");
  EXPECT_EQ(config.scheduler().lr_decay_style(), "cosine");
  EXPECT_DOUBLE_EQ(config.optimizer().weight_decay(), 0.033);
  EXPECT_DOUBLE_EQ(config.scheduler().start_weight_decay(), 0.033);
  EXPECT_DOUBLE_EQ(config.optimizer().adam_beta2(), 0.95);
  EXPECT_FALSE(config.model().bias_activation_fusion());
  EXPECT_EQ(config.tokenizer().null_tokenizer_eod_id(), 31999);
  EXPECT_EQ(resolved->per_rank().parameters(), 9903104);  // Printed by Megatron-LM.
  EXPECT_EQ(resolved->ranks(), 1);
  auto values = Values(*resolved);
  EXPECT_EQ(values["optimizer.lr"].origin(), v1::ORIGIN_OVERRIDE);
  EXPECT_EQ(values["optimizer.adam_beta2"].origin(), v1::ORIGIN_RECIPE);
  EXPECT_THAT(values["optimizer.adam_beta2"].source(), HasSubstr("pretrain_common.yaml:"));
  EXPECT_EQ(values["model.kv_channels"].origin(), v1::ORIGIN_DERIVED);
  EXPECT_EQ(values["optimizer.adam_eps"].value(), "1e-08");
  EXPECT_EQ(values["dist.distributed_timeout_minutes"].origin(), v1::ORIGIN_DEFAULT);
}

TEST(Resolve, MegatronLmRecipeHasMegatronNumbers) {
  std::vector<std::string> lines = CorrelationRun();
  for (const char* key : {"scheduler.lr_warmup_iters", "scheduler.lr_decay_iters"}) lines = Without(lines, key);
  auto resolved = Submit(lines, "vanilla_gpt_megatron_lm_config");
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const v1::ConfigContainer& config = resolved->config();
  EXPECT_DOUBLE_EQ(config.optimizer().adam_beta2(), 0.999);
  EXPECT_DOUBLE_EQ(config.optimizer().weight_decay(), 0.01);
  EXPECT_DOUBLE_EQ(config.scheduler().end_weight_decay(), 0.01);
  EXPECT_EQ(config.scheduler().lr_decay_style(), "linear");
  EXPECT_EQ(config.scheduler().lr_warmup_iters(), 0);
  EXPECT_EQ(config.scheduler().lr_decay_iters(), 10);
  EXPECT_TRUE(config.model().bias_activation_fusion());
  EXPECT_TRUE(config.model().bias_dropout_fusion());
  EXPECT_FALSE(config.ddp().use_distributed_optimizer());
  EXPECT_FALSE(config.optimizer().use_distributed_optimizer());
  EXPECT_DOUBLE_EQ(config.model().hidden_dropout(), 0.1);
  EXPECT_DOUBLE_EQ(config.optimizer().clip_grad(), 1.0);
}

TEST(Resolve, EveryRecipeResolvesForShow) {
  ASSERT_GE(ListRecipes().size(), 6u);
  for (const v1::Recipe& recipe : ListRecipes()) {
    std::vector<std::string> sizes;
    if (recipe.name().rfind("vanilla", 0) == 0 || recipe.name() == "from_hf")
      sizes = {"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"};
    auto resolved = Show(sizes, recipe.name());
    ASSERT_TRUE(resolved.ok()) << recipe.name() << ": " << resolved.status();
    EXPECT_GT(resolved->flops_per_token(), 0) << recipe.name();
    for (const std::string& alias : recipe.aliases()) EXPECT_EQ(FindRecipe(alias)->name(), recipe.name());
    // The recipe's word and the schema's agree on whether it can be trained.
    auto trained = Submit(sizes, recipe.name(), resolved->ranks());
    EXPECT_EQ(trained.ok(), recipe.trainable()) << recipe.name() << ": " << trained.status();
    if (!trained.ok()) {
      EXPECT_EQ(ReasonOf(trained.status()), v1::REASON_UNSUPPORTED_MODEL);
      EXPECT_THAT(std::string(trained.status().message()), HasSubstr(recipe.not_trainable_reason()));
      EXPECT_THAT(std::string(trained.status().message()), HasSubstr("accepted:"))
          << "the schema accepts what the recipe says can't be trained";
    }
  }
}

TEST(Resolve, NamesOfTheIssueExist) {
  for (const char* name : {"vanilla_gpt", "llama32_1b", "llama3_8b", "qwen3_8b", "deepseek_v2_lite",
                           "llama32_1b_pretrain_1gpu_h100_bf16_config", "vanilla_gpt_megatron_lm_config"}) {
    EXPECT_TRUE(FindRecipe(name).ok()) << name;
  }
  auto missing = FindRecipe("vanila_gpt_pretrain_config");
  EXPECT_EQ(ReasonOf(missing.status()), v1::REASON_UNKNOWN_RECIPE);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("vanilla_gpt_pretrain_config"));
}

// Every difference is one, in words that say why; keys that exist here have our value.
TEST(Resolve, DifferencesFromBridge) {
  for (const v1::Recipe& listed : ListRecipes()) {
    const v1::Recipe recipe = *FindRecipe(listed.name());
    std::vector<std::string> sizes;
    if (recipe.name().rfind("vanilla", 0) == 0 || recipe.name() == "from_hf")
      sizes = {"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"};
    auto resolved = Show(sizes, recipe.name());
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    auto values = Values(*resolved);
    EXPECT_GT(recipe.differences_size(), 5) << recipe.name();
    for (const v1::RecipeDifference& difference : recipe.differences()) {
      EXPECT_FALSE(difference.why().empty()) << recipe.name() << " " << difference.key();
      EXPECT_TRUE(Schema::Get().Find(difference.key()) != nullptr || difference.key() == "scheduler.max_lr")
          << recipe.name() << " " << difference.key();
    }
  }
  const auto bridge_of = [](const std::string& recipe, const std::string& key) -> std::string {
    const v1::Recipe found = FindRecipe(recipe).value();
    for (const v1::RecipeDifference& difference : found.differences()) {
      if (difference.key() == key) return difference.bridge();
    }
    return "the same";
  };
  EXPECT_EQ(bridge_of("llama3_8b", "model.vocab_size"), "32000");
  EXPECT_EQ(bridge_of("llama3_8b_sft_config", "model.vocab_size"), "the same") << "the real one there too";
  EXPECT_EQ(bridge_of("llama3_8b_sft_config", "dataset.num_workers"), "1") << "the recipe's own word before its base's";
  EXPECT_EQ(bridge_of("qwen3_8b_peft_config", "optimizer.weight_decay"), "0.1") << "from the base of all";
  EXPECT_EQ(bridge_of("vanilla_gpt", "checkpoint.load"), "the same");
}

TEST(Resolve, DifferencesNeedAReason) {
  EXPECT_FALSE(ParseConfigFile("x", "differs_from_bridge:\n  train.train_iters: {bridge: 3}\n").ok());
  EXPECT_FALSE(ParseConfigFile("x", "differs_from_bridge:\n  train.train_iters: 3\n").ok());
  EXPECT_FALSE(ParseConfigFile("x", "differs_from_bridge: [1]\n").ok());
}

TEST(Resolve, MergedConfigFiles) {
  const std::string lower = "base: from_hf\nmodel:\n  num_layers: 2\n  hidden_size: 64\n  kv_channels: 16\n";
  EXPECT_EQ(*MergeConfigFiles(lower, ""), lower);
  const std::string upper =
      "{model.kv_channels: 32, model: {transformer: {hidden_size: 128}, activation_func: \"silu\"}, train: {train_iters: 7}}";
  auto merged = MergeConfigFiles(lower, upper);
  ASSERT_TRUE(merged.ok()) << merged.status();
  auto file = ParseConfigFile("merged", *merged);
  ASSERT_TRUE(file.ok()) << file.status() << *merged;
  EXPECT_EQ(file->base, "from_hf");
  std::map<std::string, std::string> values;
  for (const Assignment& assignment : file->assignments) {
    EXPECT_TRUE(values.emplace(CanonicalKey(assignment.key), FormatValue(assignment.value)).second) << assignment.key;
  }
  EXPECT_EQ(values, (std::map<std::string, std::string>{{"model.num_layers", "2"},
                                                        {"model.kv_channels", "32"},
                                                        {"model.hidden_size", "128"},
                                                        {"model.activation_func", "silu"},
                                                        {"train.train_iters", "7"}}));
  EXPECT_EQ(ParseConfigFile("merged", *MergeConfigFiles(lower, "base: llama3_8b"))->base, "llama3_8b");
  EXPECT_EQ(ReasonOf(MergeConfigFiles(lower, "model: [").status()), v1::REASON_INVALID_CONFIG);
}

TEST(Resolve, FlopsOfKnownModels) {
  auto llama = Show({}, "llama3_8b");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_NEAR(static_cast<double>(llama->flops_per_token()), 51.45e9, 0.05e9);
  EXPECT_EQ(llama->per_rank().parameters(), 8030261248);
  EXPECT_EQ(llama->ranks(), 2);
  auto small = Show({}, "llama32_1b");
  EXPECT_EQ(small->per_rank().parameters(), 1235814400);
  auto deepseek = Show({}, "deepseek_v2_lite");
  ASSERT_TRUE(deepseek.ok()) << deepseek.status();
  EXPECT_NEAR(static_cast<double>(deepseek->per_rank().parameters()), 15.7e9, 0.1e9);
  EXPECT_EQ(deepseek->ranks(), 8);
}

// A value that differs from what the correlation run has, and that leaves the configuration valid where possible.
std::string OtherValue(const Key& key, const v1::ResolvedConfig& base) {
  static const std::map<std::string, std::string> chosen = {{"train.global_batch_size", "64"},
                                                            {"train.micro_batch_size", "8"},
                                                            {"train.train_iters", "12"},
                                                            {"train.train_samples", "640"},
                                                            {"model.hidden_size", "512"},
                                                            {"model.num_attention_heads", "8"},
                                                            {"model.vocab_size", "50304"},
                                                            {"dataset.split", "'90,5,5'"},
                                                            {"optimizer.min_lr", "1e-5"},
                                                            {"scheduler.lr_warmup_iters", "2"},
                                                            {"tokenizer.vocab_size", "33000"},
                                                            {"dataset.data_path", "[/data/a]"},
                                                            {"dataset.blend", "[[/data/a,/data/b],[0.25,0.75]]"},
                                                            {"scheduler.lr_wsd_decay_iters", "4"},
                                                            {"scheduler.lr_decay_iters", "9"},
                                                            {"scheduler.lr_warmup_init", "1e-6"},
                                                            {"scheduler.max_steps", "20"},
                                                            {"tokenizer.null_tokenizer_eod_id", "7"},
                                                            {"tokenizer.tokenizer_type", "ByteLevelTokenizer"},
                                                            {"model.layernorm_epsilon", "1e-6"},
                                                            {"optimizer.adam_eps", "1e-7"},
                                                            {"optimizer.lr", "0.01"}};
  if (auto it = chosen.find(key.path); it != chosen.end()) return it->second;
  const Value now = ReadKey(base.config(), key);
  const std::string type = key.TypeName();
  if (type == "bool") return now.boolean ? "false" : "true";
  if (type == "int") return std::to_string(now.integer + 3);
  if (type == "float") return "0.25";
  if (!key.info->allowed().empty()) {
    for (const std::string& word : key.info->allowed()) {
      if (word != now.text) return word;
    }
  }
  return "/tmp/somewhere";
}

// No set-up code resets what a user said: each key that works keeps its value, or the record says why not.
TEST(Resolve, EverySetKeyEqualsItsFinalValue) {
  const std::vector<std::string> base_lines = CorrelationRun();
  auto base = Submit(base_lines);
  ASSERT_TRUE(base.ok());
  int accepted = 0, refused = 0;
  for (const Key& key : Schema::Get().keys()) {
    if (!key.Works()) continue;
    const std::string wanted = OtherValue(key, *base);
    std::vector<std::string> lines = With(Without(base_lines, key.path), {key.path + "=" + wanted});
    if (key.path.find("seq_length") != std::string::npos)
      lines = With(Without(Without(base_lines, "dataset.seq_length"), "model.seq_length"), {key.path + "=256"});
    if (key.path == "train.train_samples") {
      for (const char* other : {"train.train_iters", "scheduler.lr_warmup_iters", "scheduler.lr_decay_iters"})
        lines = Without(lines, other);
      lines.push_back("scheduler.lr_warmup_samples=32");
    }
    auto resolved = Submit(lines);
    if (!resolved.ok()) {
      // Contradictions are refused by name, never repaired silently.
      // So are values for which the engine has no part.
      if (ReasonOf(resolved.status()) == v1::REASON_UNSUPPORTED_MODEL) {
        EXPECT_THAT(std::string(resolved.status().message()), HasSubstr("accepted: "));
      } else {
        EXPECT_FALSE(FieldViolationsOf(resolved.status()).empty()) << key.path << ": " << resolved.status();
      }
      ++refused;
      continue;
    }
    ++accepted;
    auto override_value = ParseValue(lines.back().substr(lines.back().find('=') + 1));
    for (const std::string& line : lines) {
      if (line.rfind(key.path + "=", 0) == 0) override_value = ParseValue(line.substr(line.find('=') + 1));
    }
    v1::ConfigContainer scratch;
    ASSERT_FALSE(WriteKey(key, *override_value, &scratch)) << key.path;
    bool changed = false;
    for (const auto& change : resolved->changes()) changed |= change.key() == key.path;
    EXPECT_TRUE(changed || ReadKey(resolved->config(), key) == ReadKey(scratch, key))
        << key.path << " was set to " << FormatValue(*override_value) << " and is "
        << FormatValue(ReadKey(resolved->config(), key)) << " without a record";
  }
  EXPECT_GT(accepted, 70) << refused << " refused";
}

TEST(Resolve, FileFormGivesTheSameHash) {
  const std::vector<std::vector<std::string>> cases = {
      CorrelationRun(), With(CorrelationRun(), {"mixed_precision=fp16_mixed", "optimizer.initial_loss_scale=65536"}),
      With(CorrelationRun(), {"mixed_precision=null", "dataset.data_path='0.3 /data/a 0.7 /data/b'", "dataset.split='98,1,1'"}),
      With(Without(Without(CorrelationRun(), "scheduler.lr_decay_iters"), "scheduler.lr_warmup_iters"),
           {"scheduler.lr_decay_style=WSD", "scheduler.lr_warmup_fraction=0.1"}),
      With(Without(Without(Without(CorrelationRun(), "train.train_iters"), "scheduler.lr_decay_iters"),
                   "scheduler.lr_warmup_iters"),
           {"train.train_samples=640", "scheduler.lr_warmup_samples=32"})};
  for (const auto& lines : cases) {
    auto resolved = Submit(lines);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    for (const std::string recipe : {"", "vanilla_gpt_pretrain_config", "vanilla_gpt_megatron_lm_config"}) {
      ResolveRequest again;
      again.recipe = recipe;
      again.config_yaml = ToYaml(*resolved);
      auto second = Resolve(again);
      ASSERT_TRUE(second.ok()) << recipe << second.status() << "\n" << again.config_yaml;
      EXPECT_EQ(second->config_hash(), resolved->config_hash()) << recipe << "\n" << again.config_yaml << "\n" << ToYaml(*second);
    }
    auto from_overrides = Submit(ToOverrides(*resolved));
    ASSERT_TRUE(from_overrides.ok()) << from_overrides.status();
    EXPECT_EQ(from_overrides->config_hash(), resolved->config_hash());
  }
}

TEST(Resolve, HashSeesEveryValueAndTheRanks) {
  auto base = Submit(CorrelationRun());
  EXPECT_NE(base->config_hash(), Submit(With(Without(CorrelationRun(), "rng.seed"), {"rng.seed=1235"}))->config_hash());
  EXPECT_NE(base->config_hash(), Submit(CorrelationRun(), "vanilla_gpt", 2)->config_hash());
  EXPECT_EQ(base->config_hash(), Submit(CorrelationRun(), "vanilla_gpt")->config_hash());
}

TEST(Resolve, AgainWithOtherLines) {
  ResolveRequest request;
  request.recipe = "vanilla_gpt_pretrain_config";
  request.config_yaml = "model:\n  hidden_dropout: 0.25\n";
  request.overrides = CorrelationRun();
  const auto resolved = Resolve(request);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const auto same = ResolveAgain(*resolved, {}, 1);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->config_hash(), resolved->config_hash());
  const auto other = ResolveAgain(*resolved, {"train.micro_batch_size=2", "model.recompute_granularity=selective"}, 2);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->config().train().micro_batch_size(), 2);
  EXPECT_EQ(other->config().model().recompute_granularity(), "selective");
  EXPECT_EQ(other->config().model().hidden_dropout(), 0.25);
  EXPECT_EQ(other->data_parallel_size(), 2);
  EXPECT_FALSE(ResolveAgain(*resolved, {"train.micro_batch_size=3"}, 1).ok());
}

TEST(Resolve, TensorParallelRanksShareExpertsAndLatentAttentionButNoGatedDeltaNet) {
  const std::vector<std::string> two = {"model.expert_model_parallel_size=1", "model.tensor_model_parallel_size=2"};
  const auto experts = Submit(two, "deepseek_v2_lite", 2);
  ASSERT_TRUE(experts.ok()) << experts.status();
  const auto whole = Submit({"model.expert_model_parallel_size=1"}, "deepseek_v2_lite", 1);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_LT(experts->per_rank().gradient_bytes(), whole->per_rank().gradient_bytes() * 0.51) << "experts are shared too";
  const auto delta = Submit(With(CorrelationRun(), {"model.experimental_attention_variant=gated_delta_net",
                                                    "model.linear_attention_freq=2", "model.tensor_model_parallel_size=2"}),
                            "vanilla_gpt_pretrain_config", 2);
  EXPECT_THAT(std::string(delta.status().message()),
              HasSubstr("model.tensor_model_parallel_size is 2 with model.linear_attention_freq"));
}

TEST(Overrides, WordsInListsAreAnsweredWithTheNearest) {
  const auto modules =
      Submit(With(CorrelationRun(), {"model.recompute_granularity=selective", "model.recompute_modules=[cor_attn]"}));
  EXPECT_THAT(Violation(modules.status(), "model.recompute_modules"), HasSubstr("did you mean core_attn?"));
}

TEST(Overrides, UnknownKeysAreErrorsWithTheNearestNames) {
  for (const char* prefix : {"", "+", "++"}) {
    auto resolved = Submit(With(CorrelationRun(), {std::string(prefix) + "train.trian_iters=5"}));
    ASSERT_FALSE(resolved.ok());
    EXPECT_EQ(resolved.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(resolved.status()), v1::REASON_UNKNOWN_KEY);
    EXPECT_THAT(Violation(resolved.status(), "train.trian_iters"), HasSubstr("train.train_iters"));
  }
  EXPECT_THAT(Violation(Submit({"model.learning_rate=5"}).status(), "model.learning_rate"), HasSubstr("does not exist"));
  EXPECT_THAT(Violation(Submit({"model.lr=5"}).status(), "model.lr"), HasSubstr("optimizer.lr"));
  EXPECT_THAT(Violation(Submit({"optim.lr=5"}).status(), "optim.lr"), HasSubstr("optimizer.lr"));
}

TEST(Overrides, AllWrongKeysAreReportedAtOnce) {
  auto resolved = Submit(With(CorrelationRun(), {"train.exit_intervall=5", "model.hidden_dropout=1.5", "checkpoint.load=/x"}));
  ASSERT_FALSE(resolved.ok());
  EXPECT_NE(Violation(resolved.status(), "train.exit_intervall"), "");
  EXPECT_NE(Violation(resolved.status(), "model.hidden_dropout"), "");
  EXPECT_THAT(Violation(resolved.status(), "checkpoint.load"),
              AllOf(HasSubstr("--start resume"), HasSubstr("--start fork --from ID")));
}

TEST(Overrides, WrongTypesAndRangesNameWhatIsAllowed) {
  struct Case {
    const char* line;
    const char* key;
    const char* text;
  };
  const Case cases[] = {{"train.train_iters=ten", "train.train_iters", "expects int (1 .. 1000000000000)"},
                        {"train.train_iters=1e3", "train.train_iters", "write 1000"},
                        {"train.train_iters=2.5", "train.train_iters", "expects int"},
                        {"train.global_batch_size=99999999999999999999", "train.global_batch_size", "expects int"},
                        {"model.hidden_dropout=1.0", "model.hidden_dropout", "allowed: 0 .. below 1"},
                        {"optimizer.lr=-1", "optimizer.lr", "allowed: > 0"},
                        {"optimizer.lr=nan", "optimizer.lr", "finite"},
                        {"optimizer.clip_grad=inf", "optimizer.clip_grad", "finite"},
                        {"optimizer.lr=fast", "optimizer.lr", "expects float"},
                        {"optimizer.adam_beta2=null", "optimizer.adam_beta2", "can't be null"},
                        {"ddp.check_for_nan_in_grad=1", "ddp.check_for_nan_in_grad", "true or false"},
                        {"scheduler.lr_decay_style=cosin", "scheduler.lr_decay_style", "did you mean cosine?"},
                        {"mixed_precision=16-mixed", "mixed_precision.preset", "fp16_mixed"},
                        {"mixed_precision=bf16_mix", "mixed_precision.preset", "did you mean bf16_mixed?"},
                        {"mixed_precision=bf16", "mixed_precision.preset", "did you mean bf16_mixed?"},
                        {"mixed_precision=nvfp4", "mixed_precision.preset", "did you mean bf16_with_nvfp4_mixed?"},
                        {"mixed_precision=bf16_with_fp8_curent_scaling", "mixed_precision.preset",
                         "did you mean bf16_with_fp8_current_scaling_mixed?"},
                        {"dataset.split=a,b", "dataset.split", ""},
                        {"dataset.blend=[a,b]", "dataset.blend", "[[prefix,...],[weight,...]]"},
                        {"dataset.blend=[[a,b],[1]]", "dataset.blend", "as many weights"},
                        {"checkpoint.most_recent_k=0", "checkpoint.most_recent_k", "-1 (keep all)"},
                        {"model=5", "model", "group of keys"},
                        {"optimizer.min_lr=0.5", "optimizer.min_lr", "0 .. optimizer.lr"}};
  for (const Case& c : cases) {
    const std::string key = std::string(c.line).substr(0, std::string(c.line).find('='));
    auto resolved = Submit(With(Without(CorrelationRun(), key), {c.line}));
    if (std::string(c.key) == "dataset.split") continue;  // Mock data replace it; see RealDataSplit.
    ASSERT_FALSE(resolved.ok()) << c.line;
    EXPECT_THAT(Violation(resolved.status(), c.key), HasSubstr(c.text)) << c.line << " gave " << resolved.status();
  }
}

TEST(Overrides, UnreadableLinesSayWhy) {
  const std::pair<const char*, const char*> cases[] = {{"", "is empty"},
                                                       {"   ", "is empty"},
                                                       {"train.train_iters", "has no ="},
                                                       {"=5", "no key"},
                                                       {"train.train_iters=", "value is empty"},
                                                       {"train.train_iters =5", "blanks"},
                                                       {"train.train_iters= 5", "blanks"},
                                                       {"~train.train_iters", "can't be deleted"},
                                                       {"~peft", "can't be deleted"},
                                                       {"--lr=3", "mbctl translate"},
                                                       {"dataset.data_path=[a,b", "expected , or ]"},
                                                       {"rng.seed='5", "closing"},
                                                       {"dataset.data_path=[a]b", "unexpected text"}};
  for (const auto& [line, text] : cases) {
    auto resolved = Submit(With(CorrelationRun(), {line}));
    ASSERT_FALSE(resolved.ok()) << line;
    EXPECT_THAT(Violation(resolved.status(), "overrides[17]"), HasSubstr(text)) << line;
  }
}

TEST(Overrides, TwoValuesForOneKeyAreRefused) {
  auto resolved = Submit(With(CorrelationRun(), {"train.train_iters=11"}));
  EXPECT_THAT(Violation(resolved.status(), "train.train_iters"), HasSubstr("set twice, to 10 and to 11"));
  EXPECT_TRUE(Submit(With(CorrelationRun(), {"train.train_iters=10"})).ok());
  // What is wrong with a value by itself is said as well.
  auto wrong = Submit(With(CorrelationRun(), {"train.train_iters=abc", "train.train_iters=-1"}));
  std::string all;
  for (const FieldViolation& violation : FieldViolationsOf(wrong.status())) all += violation.description + "\n";
  EXPECT_THAT(all, AllOf(HasSubstr("to 10 and to abc"), HasSubstr("to 10 and to -1"), HasSubstr("expects int"),
                         HasSubstr("-1; allowed")));
  auto llama = Show({"model.num_layers=8", "model.transformer.num_layers=4"}, "llama32_1b");
  EXPECT_THAT(Violation(llama.status(), "model.num_layers"), HasSubstr("set twice"));
}

TEST(Overrides, NestedModelKeysOnlyForLlama) {
  auto llama = Show({"model.transformer.num_layers=4"}, "llama32_1b");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_EQ(llama->config().model().num_layers(), 4);
  EXPECT_EQ(Show({"model.num_layers=4"}, "llama32_1b")->config().model().num_layers(), 4);
  EXPECT_THAT(Violation(Submit({"model.transformer.num_layers=4"}).status(), "model.transformer.num_layers"),
              HasSubstr("write model.num_layers"));
}

TEST(Overrides, DeprecatedPlacesMoveWithARecord) {
  auto resolved = Submit(With(Without(CorrelationRun(), "validation.eval_iters"), {"train.eval_iters=3"}));
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->config().validation().eval_iters(), 3);
  ASSERT_EQ(resolved->changes_size(), 2);  // The other is the split of mock data.
  EXPECT_EQ(resolved->changes(0).key(), "train.eval_iters");
  EXPECT_THAT(Violation(Submit(With(CorrelationRun(), {"train.eval_iters=3"})).status(), "validation.eval_iters"),
              HasSubstr("set twice"));
}

TEST(Overrides, OneNameForAllWaysToWriteAKey) {
  EXPECT_EQ(CanonicalKey("train.eval_iters"), "validation.eval_iters");
  EXPECT_EQ(CanonicalKey("dataset.sequence_length"), "dataset.seq_length");
  EXPECT_EQ(CanonicalKey("mixed_precision"), "mixed_precision.preset");
  EXPECT_EQ(CanonicalKey("model.transformer.num_layers"), "model.num_layers");
  EXPECT_EQ(CanonicalKey("train.train_iters"), "train.train_iters");
}

TEST(Overrides, KeysWithoutEffectAreRefusedByName) {
  for (const char* line : {"train.manual_gc=true", "logger.tensorboard_dir=/x", "checkpoint.load=/x", "ft.enable_ft_package=true",
                           "dist.use_sharp=true"}) {
    auto resolved = Submit(With(CorrelationRun(), {line}));
    EXPECT_EQ(ReasonOf(resolved.status()), v1::REASON_KEY_WITHOUT_EFFECT) << line;
  }
  auto planned = Submit(With(CorrelationRun(), {"model.pipeline_model_parallel_size=2"}), "vanilla_gpt_pretrain_config", 2);
  EXPECT_EQ(planned.status().code(), absl::StatusCode::kUnimplemented) << planned.status();
  EXPECT_EQ(ReasonOf(planned.status()), v1::REASON_UNSUPPORTED_MODEL);
  EXPECT_THAT(std::string(planned.status().message()), HasSubstr("accepted: 1"));
  EXPECT_TRUE(Submit(With(CorrelationRun(), {"model.normalization=LayerNorm", "model.pipeline_model_parallel_size=1"})).ok());
}

}  // namespace
}  // namespace mbridge::recipes
