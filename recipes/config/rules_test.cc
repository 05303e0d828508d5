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

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(TensorParallel, RanksFollowAndTheVocabularyIsPaddedForThem) {
  const auto resolved = Submit(
      With(CorrelationRun(), {"model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "tokenizer.vocab_size=1100"}),
      "vanilla_gpt_pretrain_config", 0);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->ranks(), 2);
  EXPECT_EQ(resolved->data_parallel_size(), 1);
  EXPECT_EQ(resolved->config().model().vocab_size(), 1280);  // 5 * 128 * 2.
  EXPECT_TRUE(resolved->config().model().sequence_parallel());
}

TEST(TensorParallel, OnOneRankTheSequenceIsWholeAndTheRecordSaysSo) {
  const auto resolved = Submit(With(CorrelationRun(), {"model.sequence_parallel=true"}));
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_FALSE(resolved->config().model().sequence_parallel());
  EXPECT_THAT(resolved->changes(), testing::Contains(testing::Property(&v1::AutomaticChange::key, "model.sequence_parallel")));
}

TEST(TensorParallel, SizesThatDoNotDivideAreRefusedByName) {
  const auto problem = [](const std::vector<std::string>& lines, int ranks) {
    std::vector<std::string> run = CorrelationRun();
    for (const std::string& line : lines) run = Without(run, line.substr(0, line.find('=')));
    return Violation(Submit(With(run, lines), "vanilla_gpt_pretrain_config", ranks).status(), "model.tensor_model_parallel_size");
  };
  EXPECT_THAT(problem({"model.tensor_model_parallel_size=3"}, 3), HasSubstr("divisors of model.num_attention_heads 4"));
  EXPECT_THAT(problem({"model.tensor_model_parallel_size=4", "model.num_query_groups=2"}, 4),
              HasSubstr("divisors of model.num_query_groups 2, so that each rank has whole groups"));
  EXPECT_THAT(problem({"model.tensor_model_parallel_size=2", "model.ffn_hidden_size=1023"}, 2),
              HasSubstr("divisors of model.ffn_hidden_size 1023"));
}

TEST(ModelParts, OfTheLlamaFamilyCanBeTrained) {
  for (const char* line :
       {"model.normalization=RMSNorm", "model.position_embedding_type=rope", "model.position_embedding_type=none",
        "model.num_query_groups=2", "model.add_bias_linear=false", "model.add_qkv_bias=true",
        "model.share_embeddings_and_output_weights=false", "model.window_size=[127,0]", "model.rotary_interleaved=true",
        "model.layernorm_zero_centered_gamma=true", "model.activation_func=gelu_pytorch_tanh",
        "model.activation_func=squared_relu", "model.gated_linear_unit=true", "model.post_layernorm=true",
        "model.softmax_scale=0.1", "model.window_attn_skip_freq=[0,1]", "model.no_rope_freq=[2]", "ddp.overlap_grad_reduce=true",
        "ddp.average_in_collective=true"}) {
    auto resolved = Submit(With(CorrelationRun(), {line}));
    EXPECT_TRUE(resolved.ok()) << resolved.status();
  }
  auto swiglu = Submit(With(CorrelationRun(), {"model.gated_linear_unit=true", "model.activation_func=silu"}));
  EXPECT_TRUE(swiglu.ok()) << swiglu.status();
  auto norms = Submit(With(CorrelationRun(), {"model.qk_layernorm=true", "model.normalization=RMSNorm"}));
  EXPECT_TRUE(norms.ok()) << norms.status();
}

TEST(ModelParts, OthersAreRefusedByName) {
  for (const auto& [line, accepted] : std::vector<std::pair<std::string, std::string>>{
           {"model.position_embedding_type=mrope", "learned_absolute, rope, yarn, none"},
           {"model.position_embedding_type=yarn", "a factor above 0"},
           {"model.activation_func=silu", "gelu, gelu_pytorch_tanh, squared_relu, or with model.gated_linear_unit=true silu"},
           {"model.window_attn_skip_freq=[1,0,1]", "one number from 1 on, or a 0 or 1 for each of the 2 layers"},
           {"model.qk_layernorm=true", "model.normalization=RMSNorm"},
           {"model.window_size=[127,1]", "[left, 0]"},
           {"model.qk_l2_norm=true", "false"}}) {
    auto resolved = Submit(With(CorrelationRun(), {line}));
    EXPECT_EQ(ReasonOf(resolved.status()), v1::REASON_UNSUPPORTED_MODEL) << line << ": " << resolved.status();
    EXPECT_THAT(std::string(resolved.status().message()), HasSubstr("accepted: " + accepted)) << line;
  }
  EXPECT_THAT(Violation(Submit(With(CorrelationRun(), {"model.num_query_groups=3"})).status(), "model.num_query_groups"),
              HasSubstr("divisors"));
  auto odd = Submit(With(CorrelationRun(), {"model.position_embedding_type=rope", "model.rotary_percent=0.05"}));
  EXPECT_THAT(Violation(odd.status(), "model.rotary_percent"), HasSubstr("turns 3 of the model.kv_channels 64"));
}

TEST(ModelParts, RecipesWithoutTheMissingPartCanBeTrained) {
  auto llama = Submit({"model.num_layers=2"}, "llama32_1b");
  EXPECT_TRUE(llama.ok()) << llama.status();
  EXPECT_EQ(ReasonOf(Submit({}, "llama3_8b", 2).status()), v1::REASON_UNSUPPORTED_MODEL);
  auto larger = Submit({"model.context_parallel_size=1"}, "llama3_8b");
  EXPECT_TRUE(larger.ok()) << larger.status();
  auto qwen = Submit({"tokenizer.tokenizer_type=NullTokenizer", "tokenizer.tokenizer_model=null", "tokenizer.vocab_size=151936",
                      "optimizer.use_precision_aware_optimizer=false"},
                     "qwen3_8b");
  EXPECT_TRUE(qwen.ok()) << qwen.status();
}

TEST(Rules, SequenceLength) {
  const auto lines = Without(Without(CorrelationRun(), "model.seq_length"), "dataset.seq_length");
  auto one = Submit(With(lines, {"dataset.seq_length=128"}));
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->config().model().seq_length(), 128);
  bool recorded = false;
  for (const auto& change : one->changes()) recorded |= change.key() == "model.seq_length" && change.new_value() == "128";
  EXPECT_TRUE(recorded);
  auto other = Submit(With(lines, {"model.seq_length=64"}));
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(other->config().dataset().seq_length(), 64);
  EXPECT_THAT(Violation(Submit(With(lines, {"model.seq_length=64", "dataset.seq_length=128"})).status(), "dataset.seq_length"),
              HasSubstr("must be equal"));
}

TEST(Rules, ShortTrainingShowsTheCompletedCommand) {
  auto resolved = Submit({"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4", "train.train_iters=10"});
  ASSERT_FALSE(resolved.ok());
  EXPECT_THAT(Violation(resolved.status(), "train.train_iters"),
              HasSubstr("mbctl submit --recipe vanilla_gpt_pretrain_config model.num_layers=2 model.hidden_size=256 "
                        "model.num_attention_heads=4 train.train_iters=10 "
                        "scheduler.lr_warmup_iters=1 scheduler.lr_decay_iters=10"));
  EXPECT_THAT(Violation(resolved.status(), "train.train_iters"), Not(HasSubstr("exit_interval")));  // The decay is as long.
  // The shown line works.
  EXPECT_TRUE(Submit({"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4", "train.train_iters=10",
                      "scheduler.lr_warmup_iters=1", "scheduler.lr_decay_iters=10"})
                  .ok());
  // A decay that is longer than the training is refused, of the recipe or of the user; the way to train a part is named.
  EXPECT_THAT(Violation(Show({"train.train_iters=50"}, "qwen3_8b").status(), "train.train_iters"),
              HasSubstr("scheduler.lr_decay_iters=50"));
  const auto longer = Submit(With(Without(CorrelationRun(), "scheduler.lr_decay_iters"), {"scheduler.lr_decay_iters=20"}));
  EXPECT_THAT(Violation(longer.status(), "train.train_iters"),
              testing::AllOf(HasSubstr("scheduler.lr_decay_iters=10"),
                             HasSubstr("train.train_iters=20 and stop with train.exit_interval=10")));
  EXPECT_FALSE(Submit(With(Without(CorrelationRun(), "scheduler.lr_warmup_iters"), {"scheduler.lr_warmup_iters=10"})).ok());
}

TEST(Rules, DecayFollowsTheOverriddenLength) {
  auto resolved = Submit(
      With(Without(Without(CorrelationRun(), "scheduler.lr_decay_iters"), "train.train_iters"), {"train.train_iters=2000"}));
  ASSERT_TRUE(resolved.ok());
  EXPECT_EQ(resolved->config().scheduler().lr_decay_iters(), 2000);
}

TEST(Rules, GlobalBatchMustDivide) {
  auto resolved =
      Submit(With(Without(CorrelationRun(), "train.micro_batch_size"), {"train.micro_batch_size=3"}), "vanilla_gpt", 2);
  EXPECT_THAT(Violation(resolved.status(), "train.global_batch_size"),
              HasSubstr("3 * 2 = 6; use train.global_batch_size=30 or 36, or a train.micro_batch_size of 16, 8, 4, 2"));
  EXPECT_EQ(Submit(CorrelationRun(), "vanilla_gpt", 2)->data_parallel_size(), 2);
  ASSERT_FALSE(Submit(CorrelationRun(), "vanilla_gpt", -1).ok());
  ResolveRequest three;
  three.recipe = "llama3_8b";
  three.ranks = 3;
  three.require_trainable = false;
  EXPECT_THAT(Violation(Resolve(three).status(), "ranks"), HasSubstr("multiples of 2"));
}

TEST(Rules, WeightDecayHasOneMeaning) {
  auto plain = Submit(With(CorrelationRun(), {"optimizer.weight_decay=0.1"}));
  ASSERT_TRUE(plain.ok());
  EXPECT_DOUBLE_EQ(plain->config().scheduler().start_weight_decay(), 0.1);
  EXPECT_DOUBLE_EQ(plain->config().scheduler().end_weight_decay(), 0.1);
  EXPECT_THAT(
      Violation(Submit(With(CorrelationRun(), {"optimizer.weight_decay=0.1", "scheduler.start_weight_decay=0.033"})).status(),
                "scheduler.start_weight_decay"),
      HasSubstr("set optimizer.weight_decay alone"));
  auto by_schedule = Submit(With(CorrelationRun(), {"scheduler.start_weight_decay=0.2", "scheduler.end_weight_decay=0.2"}));
  ASSERT_TRUE(by_schedule.ok()) << by_schedule.status();
  EXPECT_DOUBLE_EQ(by_schedule->config().optimizer().weight_decay(), 0.2);
  EXPECT_FALSE(Submit(With(CorrelationRun(), {"scheduler.start_weight_decay=0.1", "scheduler.end_weight_decay=0.2"})).ok());
  EXPECT_TRUE(Submit(With(CorrelationRun(), {"scheduler.start_weight_decay=0.1", "scheduler.end_weight_decay=0.2",
                                             "scheduler.weight_decay_incr_style=linear"}))
                  .ok());
  EXPECT_FALSE(Submit(With(CorrelationRun(), {"scheduler.weight_decay_incr_style=linear"})).ok());
}

TEST(Rules, Precision) {
  auto fp16 = Submit(With(CorrelationRun(), {"mixed_precision=fp16_mixed"}));
  ASSERT_TRUE(fp16.ok()) << fp16.status();
  EXPECT_TRUE(fp16->config().model().fp16());
  EXPECT_FALSE(fp16->config().model().bf16());
  EXPECT_EQ(fp16->config().model().params_dtype(), "fp16");
  EXPECT_FALSE(fp16->warnings().empty());
  auto scale = Submit(With(CorrelationRun(), {"mixed_precision=fp16_mixed", "optimizer.initial_loss_scale=1024"}));
  EXPECT_DOUBLE_EQ(scale->config().mixed_precision().initial_loss_scale(), 1024);
  for (const char* line : {"mixed_precision=fp32", "mixed_precision=null"}) {
    auto fp32 = Submit(With(CorrelationRun(), {line}));
    ASSERT_TRUE(fp32.ok()) << fp32.status();
    EXPECT_FALSE(fp32->config().optimizer().bf16());
    EXPECT_EQ(fp32->config().model().params_dtype(), "fp32");
  }
  EXPECT_THAT(Violation(Submit(With(CorrelationRun(), {"model.bf16=false"})).status(), "model.bf16"),
              HasSubstr("mixed_precision=bf16_mixed"));
  EXPECT_EQ(ReasonOf(Submit(With(CorrelationRun(), {"ddp.grad_reduce_in_fp32=false"})).status()), v1::REASON_UNSUPPORTED_MODEL);
}

TEST(Rules, NarrowPrecisions) {
  struct Expected {
    const char* preset;
    const char *fp8, *recipe;
    int64_t first, last;
    bool fp16;
  };
  for (const Expected& e : {Expected{"bf16_with_fp8_delayed_scaling_mixed", "hybrid", "delayed", -1, -1, false},
                            {"fp16_with_fp8_delayed_scaling_mixed", "hybrid", "delayed", -1, -1, true},
                            {"bf16-with-fp8-current-scaling-mixed", "hybrid", "tensorwise", 1, 1, false},
                            {"fp16_with_fp8_current_scaling_mixed", "hybrid", "tensorwise", 1, 1, true},
                            {"nemotron_h_bf16_with_fp8_current_scaling_mixed", "hybrid", "tensorwise", 2, 2, false},
                            {"nanov2_bf16_with_fp8_current_scaling_mixed", "hybrid", "blockwise", 2, 2, false},
                            {"bf16_with_fp8_subchannel_scaling_mixed", "hybrid", "blockwise", -1, -1, false},
                            {"fp16_with_mxfp8_mixed", "e4m3", "mxfp8", -1, -1, true},
                            {"bf16_with_nvfp4_mixed", "", "", -1, -1, false},
                            {"nemotron_3_super_bf16_with_nvfp4_mixed", "", "", 0, 14, false}}) {
    SCOPED_TRACE(e.preset);
    auto resolved = Submit(With(CorrelationRun(), {std::string("mixed_precision=") + e.preset}));
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    const v1::ModelConfig& model = resolved->config().model();
    EXPECT_EQ(model.fp8(), e.fp8);
    EXPECT_EQ(model.fp4(), *e.fp8 == 0 ? "e2m1" : "");
    if (*e.fp8 != 0) {
      EXPECT_EQ(model.fp8_recipe(), e.recipe);
    }
    EXPECT_EQ(model.fp16(), e.fp16);
    EXPECT_EQ(model.first_last_layers_bf16(), e.first >= 0);
    if (e.first >= 0) {
      EXPECT_EQ(model.num_layers_at_start_in_bf16(), e.first);
      EXPECT_EQ(model.num_layers_at_end_in_bf16(), e.last);
    }
  }
  const std::string delayed = "mixed_precision=bf16_with_fp8_delayed_scaling_mixed";
  auto changed = Submit(With(CorrelationRun(), {delayed, "model.fp8_amax_history_len=16", "mixed_precision.fp8_margin=2"}));
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->config().model().fp8_amax_history_len(), 16);
  EXPECT_EQ(changed->config().model().fp8_margin(), 2);
  EXPECT_EQ(changed->config().model().fp8_amax_compute_algo(), "max");
  // The switch alone would keep no layer.
  EXPECT_THAT(Submit(With(CorrelationRun(), {delayed, "mixed_precision.first_last_layers_bf16=true"})).status().message(),
              AllOf(HasSubstr("mixed_precision.first_last_layers_bf16"), HasSubstr("num_layers_at_start_in_bf16")));
  EXPECT_TRUE(Submit(With(CorrelationRun(), {delayed, "mixed_precision.first_last_layers_bf16=true",
                                             "mixed_precision.num_layers_at_end_in_bf16=1"}))
                  .ok());
  auto by_model = Submit(With(CorrelationRun(), {"model.fp8=e4m3", "model.fp8_recipe=blockwise"}));
  ASSERT_TRUE(by_model.ok()) << by_model.status();
  EXPECT_EQ(by_model->config().model().fp8_recipe(), "blockwise");
}

TEST(Rules, RefusedNarrowPrecisions) {
  const auto submit = [](const std::vector<std::string>& lines) {
    std::vector<std::string> all = CorrelationRun();
    for (const std::string& line : lines) all = With(Without(all, line.substr(0, line.find('='))), {line});
    return Submit(all);
  };
  const auto violation = [&](const std::vector<std::string>& lines, const char* key) {
    return Violation(submit(lines).status(), key);
  };
  const auto unsupported = [&](const std::vector<std::string>& lines) {
    const absl::Status status = submit(lines).status();
    EXPECT_EQ(ReasonOf(status), v1::REASON_UNSUPPORTED_MODEL);
    return std::string(status.message());
  };
  const std::string current = "mixed_precision=bf16_with_fp8_current_scaling_mixed";
  EXPECT_THAT(unsupported({current, "model.fp8_dot_product_attention=true"}), HasSubstr("16 bits"));
  EXPECT_THAT(unsupported({current, "model.fp8_output_proj=true"}), HasSubstr("accepted: false"));
  EXPECT_THAT(unsupported({current, "model.fp8_recipe=custom"}), HasSubstr("tensorwise"));
  EXPECT_THAT(violation({current, "model.fp8_recipe=delaid"}, "model.fp8_recipe"), HasSubstr("did you mean delayed?"));
  EXPECT_THAT(violation({current, "model.fp8_margin=17"}, "model.fp8_margin"), HasSubstr("0 .. 16"));
  EXPECT_THAT(violation({current, "model.fp8_amax_history_len=0"}, "model.fp8_amax_history_len"), HasSubstr("1 .. 16384"));
  EXPECT_THAT(violation({current, "model.fp4=e2m1"}, "model.fp4"), HasSubstr("model.fp8"));
  EXPECT_THAT(violation({"mixed_precision=fp32", "model.fp8=hybrid"}, "model.fp8"), HasSubstr("bf16_mixed"));
  EXPECT_THAT(violation({current, "model.ffn_hidden_size=1000"}, "model.ffn_hidden_size"), HasSubstr("multiples of 16"));
  EXPECT_THAT(violation({"mixed_precision=bf16_with_mxfp8_mixed", "model.ffn_hidden_size=1008"}, "model.ffn_hidden_size"),
              HasSubstr("multiples of 32"));
  EXPECT_THAT(violation({current, "train.micro_batch_size=1", "model.seq_length=1000", "dataset.seq_length=1000"},
                        "train.micro_batch_size"),
              HasSubstr("1000"));
  auto all_apart = Submit(With(CorrelationRun(), {current}));
  ASSERT_TRUE(all_apart.ok());
  EXPECT_THAT(all_apart->warnings(), Contains(HasSubstr("keep all model.num_layers (2) layers in 16 bits")));
}

TEST(Rules, Vocabulary) {
  auto padded = Submit(With(CorrelationRun(), {"tokenizer.vocab_size=2047"}));
  EXPECT_EQ(padded->config().model().vocab_size(), 2048);
  auto explicit_size = Submit(With(CorrelationRun(), {"model.vocab_size=50304"}));
  ASSERT_TRUE(explicit_size.ok()) << explicit_size.status();
  EXPECT_EQ(explicit_size->config().model().vocab_size(), 50304);
  EXPECT_THAT(Violation(Submit(With(CorrelationRun(), {"model.vocab_size=100"})).status(), "model.vocab_size"),
              HasSubstr(">= tokenizer.vocab_size"));
  EXPECT_THAT(Violation(Submit(With(CorrelationRun(), {"tokenizer.null_tokenizer_eod_id=32000"})).status(),
                        "tokenizer.null_tokenizer_eod_id"),
              HasSubstr("0 .. 31999"));
}

TEST(Rules, ByteLevelTokenizerBringsItsVocabulary) {
  auto resolved = Submit(With(CorrelationRun(), {"tokenizer.tokenizer_type=ByteLevelTokenizer", "dataset.data_path=/data/a"}));
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->config().tokenizer().vocab_size(), 257);
  EXPECT_EQ(resolved->config().tokenizer().null_tokenizer_eod_id(), 256);
  EXPECT_EQ(resolved->config().model().vocab_size(), 384);
  auto small = Submit(With(CorrelationRun(), {"tokenizer.tokenizer_type=ByteLevelTokenizer", "tokenizer.vocab_size=100"}));
  EXPECT_THAT(Violation(small.status(), "tokenizer.vocab_size"), HasSubstr("257 or more"));
}

TEST(Rules, Data) {
  auto real = Submit(With(CorrelationRun(), {"dataset.data_path=/data/a"}));
  ASSERT_TRUE(real.ok()) << real.status();
  EXPECT_FALSE(real->config().dataset().mock());
  EXPECT_EQ(real->config().dataset().blend().prefixes(0), "/data/a");
  EXPECT_EQ(real->config().dataset().split(), "9999,8,2");
  auto weighted = Submit(With(CorrelationRun(), {"dataset.data_path=[0.3,/data/a,0.7,/data/b]"}));
  EXPECT_EQ(weighted->config().dataset().blend().weights_size(), 2);
  EXPECT_THAT(Violation(Submit(With(CorrelationRun(), {"dataset.mock=false"})).status(), "dataset.data_path"),
              HasSubstr("is not set"));
  EXPECT_FALSE(Submit(With(CorrelationRun(), {"dataset.mock=true", "dataset.data_path=/data/a"})).ok());
  for (const char* split : {"dataset.split=a,b", "dataset.split='0,0,0'", "dataset.split='1,2,3,4'", "dataset.split='-1,2,3'",
                            "dataset.split='0,1,1'"}) {
    EXPECT_NE(Violation(Submit(With(CorrelationRun(), {"dataset.data_path=/data/a", split})).status(), "dataset.split"), "")
        << split;
  }
}

TEST(Rules, MissingSizesAreNamed) {
  auto resolved = Submit({});
  EXPECT_THAT(Violation(resolved.status(), "model.num_layers"), HasSubstr("model.num_layers=2"));
  EXPECT_NE(Violation(resolved.status(), "model.hidden_size"), "");
  EXPECT_THAT(Violation(Submit({"model.num_layers=2", "model.hidden_size=250", "model.num_attention_heads=4"}).status(),
                        "model.num_attention_heads"),
              HasSubstr("does not divide"));
}

// Whatever stands in a request: an answer, never a crash.
TEST(Rules, ExtremeNumbersAreRefused) {
  for (const Key& key : Schema::Get().keys()) {
    if (key.info->effect() == v1::EFFECT_NONE || (key.TypeName() != "int" && key.TypeName() != "float")) continue;
    for (const char* value : {"0", "9223372036854775807", "1000000000000", "16777216", "1e308"}) {
      ResolveRequest request;
      request.recipe = "vanilla_gpt";
      request.overrides = With(Without(CorrelationRun(), key.path), {key.path + "=" + value});
      request.require_trainable = false;
      auto resolved = Resolve(request);
      EXPECT_TRUE(!resolved.ok() || resolved->per_rank().activation_bytes() >= 0) << key.path << "=" << value;
    }
  }
  EXPECT_THAT(Violation(Submit(With(Without(CorrelationRun(), "model.hidden_size"),
                                    {"model.hidden_size=1048576", "model.ffn_hidden_size=4194304"}))
                            .status(),
                        "model.ffn_hidden_size"),
              HasSubstr("set twice"));
  EXPECT_THAT(Violation(Submit({"model.num_layers=16384", "model.hidden_size=1048576", "model.num_attention_heads=4"}).status(),
                        "model.hidden_size"),
              HasSubstr("at most 1e15"));
}

TEST(Rules, ARecipeWithoutSizesCanBeShown) {
  auto shown = Show({}, "vanilla_gpt");
  ASSERT_TRUE(shown.ok()) << shown.status();
  EXPECT_THAT(shown->warnings(), ::testing::Contains(HasSubstr("model.num_layers is not set")));
  EXPECT_FALSE(shown->config().model().has_num_layers());
}

TEST(ConfigFiles, ErrorsNameFileAndLine) {
  ResolveRequest request;
  request.recipe = "vanilla_gpt";
  request.overrides = CorrelationRun();
  request.config_yaml = "logger:\n  log_interval: 5\n  log_intervall: 5\n";
  EXPECT_THAT(Violation(Resolve(request).status(), "logger.log_intervall"), HasSubstr("config:3"));
  request.config_yaml = "logger:\n  log_params_norm: maybe\n";
  EXPECT_THAT(Violation(Resolve(request).status(), "logger.log_params_norm"), HasSubstr("config:2"));
  request.config_yaml = "logger: [\n";
  EXPECT_THAT(Violation(Resolve(request).status(), "config_yaml"), HasSubstr("config:"));
  request.config_yaml = "logger:\n  log_interval: 5\n  log_interval: 6\n";
  EXPECT_THAT(Violation(Resolve(request).status(), "config_yaml"), HasSubstr("twice"));
  request.config_yaml = "logger:\n  log_params_norm: true\n";
  auto resolved = Resolve(request);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_TRUE(resolved->config().logger().log_params_norm());
  EXPECT_EQ(Values(*resolved)["logger.log_params_norm"].origin(), v1::ORIGIN_FILE);
}

TEST(Recipes, SetNoKeyWithoutEffect) {
  for (const ConfigFile& file : RecipeFiles()) {
    for (const Assignment& assignment : file.assignments) {
      const Key* key = Schema::Get().Find(assignment.key);
      if (key == nullptr) continue;  // A group: mixed_precision.
      EXPECT_NE(key->info->effect(), v1::EFFECT_NONE) << assignment.source;
    }
  }
}

TEST(Kinds, OnlyPretrainingNow) {
  ResolveRequest request;
  request.recipe = "vanilla_gpt";
  request.overrides = CorrelationRun();
  request.kind = v1::JOB_KIND_FINETUNE;
  EXPECT_EQ(ReasonOf(Resolve(request).status()), v1::REASON_UNSUPPORTED_JOB_KIND);
}

}  // namespace
}  // namespace mbridge::recipes
