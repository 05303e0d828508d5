#include "engine/train/training_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"
#include "engine/train/mixer_parts.h"
#include "engine/train/model_keys.h"
#include "engine/train/model_parts.h"
#include "recipes/config/estimate.h"
#include "recipes/config/resolve.h"

namespace mbridge {
namespace {

GptConfig ModelOf(const std::string& recipe, const std::vector<std::string>& overrides) {
  recipes::ResolveRequest request;
  request.recipe = recipe;
  request.overrides = overrides;
  const auto resolved = recipes::Resolve(request);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  if (!resolved.ok()) return {};
  const auto plan = MakeTrainingPlan(*resolved);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return {};
  ValidateGptConfig(plan->model);
  return plan->model;
}

TEST(TrainingPlanTest, ModelOfTheVanillaRecipe) {
  const GptConfig model = ModelOf("vanilla_gpt", {"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"});
  EXPECT_EQ(model.normalization, NormKind::kLayerNorm);
  EXPECT_EQ(model.activation, ActivationKind::kGelu);
  EXPECT_EQ(model.position_embedding, PositionKind::kLearnedAbsolute);
  EXPECT_TRUE(model.add_bias_linear && model.tied_embeddings);
  EXPECT_FALSE(model.add_qkv_bias || model.qk_layernorm || model.rope_scaling);
  EXPECT_EQ(model.num_query_groups, 4);
  EXPECT_EQ(model.attention_window, 0);
}

TEST(TrainingPlanTest, PrecisionAwareOptimizer) {
  const auto plan_of = [](std::vector<std::string> overrides) {
    recipes::ResolveRequest request;
    request.recipe = "llama32_1b";
    request.overrides = std::move(overrides);
    const auto resolved = recipes::Resolve(request);
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    return MakeTrainingPlan(*resolved);
  };
  const auto plain = plan_of({});
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->moment_dtype, DType::kF32);
  EXPECT_FALSE(plain->split_masters);
  const std::string aware = "optimizer.use_precision_aware_optimizer=true", first = "optimizer.exp_avg_dtype=bf16",
                    second = "optimizer.exp_avg_sq_dtype=bf16";
  const auto narrow = plan_of({aware, first, second});
  ASSERT_TRUE(narrow.ok()) << narrow.status();
  EXPECT_EQ(narrow->moment_dtype, DType::kBF16);
  EXPECT_TRUE(narrow->split_masters);
  EXPECT_FALSE(plan_of({aware, first}).ok());
  EXPECT_FALSE(plan_of({first, second}).ok());
}

TEST(TrainingPlanTest, ModelOfTheLlamaRecipes) {
  const GptConfig small = ModelOf("llama32_1b", {});
  EXPECT_EQ(small.normalization, NormKind::kRmsNorm);
  EXPECT_EQ(small.activation, ActivationKind::kSwiGlu);
  EXPECT_EQ(small.position_embedding, PositionKind::kRope);
  EXPECT_EQ(small.num_query_groups, 8);
  EXPECT_EQ(small.kv_channels, 64);
  EXPECT_EQ(small.ffn_hidden_size, 8192);
  EXPECT_EQ(small.layernorm_epsilon, 1e-5);
  EXPECT_EQ(small.rotary_base, 500000);
  EXPECT_TRUE(small.rope_scaling && small.tied_embeddings);
  EXPECT_EQ(small.rope_scaling_factor, 32);
  EXPECT_EQ(small.rope_original_length, 8192);
  EXPECT_FALSE(small.add_bias_linear);
  EXPECT_EQ(small.hidden_dropout, 0);
  const GptConfig large = ModelOf("llama3_8b", {"model.context_parallel_size=1"});
  EXPECT_EQ(large.num_layers, 32);
  EXPECT_FALSE(large.rope_scaling || large.tied_embeddings);
}

TEST(TrainingPlanTest, ModelOfTheDeepSeekRecipe) {
  const std::vector<std::string> one_rank = {"model.expert_model_parallel_size=1", "model.num_layers=3",
                                             "model.moe_layer_freq=[0,1,1]"};
  const GptConfig model = ModelOf("deepseek_v2_lite", one_rank);
  EXPECT_TRUE(model.multi_latent_attention && model.rotary_interleaved && model.moe_router_fp32);
  EXPECT_EQ(model.q_lora_rank, 0);
  EXPECT_EQ(model.kv_lora_rank, 512);
  EXPECT_EQ(model.kv_channels, 192);
  EXPECT_EQ(model.v_head_dim, 128);
  EXPECT_EQ(model.yarn_rotary_scaling_factor, 40);
  EXPECT_EQ(model.mscale_all_dim, 0.707);
  EXPECT_EQ(model.rope_attention_factor, 1);  // mscale and mscale_all_dim are equal.
  EXPECT_EQ(model.num_moe_experts, 64);
  EXPECT_EQ(model.moe_layer_freq, (std::vector<int64_t>{0, 1, 1}));
  EXPECT_EQ(model.moe_ffn_hidden_size, 1408);
  EXPECT_EQ(model.moe_shared_expert_intermediate_size, 2816);
  EXPECT_EQ(model.moe_router_topk, 6);
  EXPECT_EQ(model.moe_router_score, RouterScore::kSoftmax);
  EXPECT_EQ(model.moe_load_balancing, LoadBalancing::kSequence);
  EXPECT_EQ(model.moe_aux_loss_coeff, 0.001);
  EXPECT_EQ(model.recompute, Recompute::kUniform);
  EXPECT_EQ(model.recompute_num_layers, 1);

  // The estimates of the recipe are the engine's numbers.
  recipes::ResolveRequest request;
  request.recipe = "deepseek_v2_lite";
  request.overrides = one_rank;
  const auto resolved = recipes::Resolve(request);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  GptModel built(model, nullptr);
  ParameterStore store(model.dtype, DeviceType::kCpu);
  built.DeclareParameters(&store);
  EXPECT_EQ(resolved->per_rank().parameters(), store.NumElements());
  EXPECT_NEAR(static_cast<double>(resolved->flops_per_token()), built.FlopsPerToken(), 1e-6 * built.FlopsPerToken());
}

// Experts, latent attention and sinks of a family of Hugging Face survive as keys of a recipe.
TEST(TrainingPlanTest, ExpertPartsThereAndBack) {
  GptConfig base;
  base.num_layers = 2;
  base.hidden_size = 64;
  base.num_attention_heads = base.num_query_groups = 4;
  base.kv_channels = 16;
  base.ffn_hidden_size = 128;
  base.seq_length = base.max_position_embeddings = 32;
  base.padded_vocab_size = 320;
  base.normalization = NormKind::kRmsNorm;
  base.activation = ActivationKind::kSwiGlu;
  base.position_embedding = PositionKind::kRope;
  base.add_bias_linear = base.tied_embeddings = base.bias_activation_fusion = base.bias_dropout_fusion = false;
  base.hidden_dropout = base.attention_dropout = 0;
  base.dtype = DType::kF32;

  GptConfig experts = base;
  experts.num_moe_experts = 8;
  experts.moe_layer_freq = {0, 1};
  experts.moe_ffn_hidden_size = 32;
  experts.moe_shared_expert_intermediate_size = 64;
  experts.moe_shared_expert_gate = experts.moe_router_fp32 = experts.moe_router_enable_expert_bias = true;
  experts.moe_router_topk = 3;
  experts.moe_router_score = RouterScore::kSigmoid;
  experts.moe_router_num_groups = 4;
  experts.moe_router_group_topk = 2;
  experts.moe_router_group_experts = 2;
  experts.moe_router_topk_scaling_factor = 2.5;
  experts.moe_load_balancing = LoadBalancing::kSequence;
  experts.moe_aux_loss_coeff = 0.01;
  experts.moe_z_loss_coeff = 0.001;

  GptConfig latent = base;
  latent.multi_latent_attention = latent.rotary_interleaved = true;
  latent.q_lora_rank = 48;
  latent.kv_lora_rank = 32;
  latent.qk_head_dim = 16;
  latent.qk_pos_emb_head_dim = 8;
  latent.kv_channels = 24;
  latent.v_head_dim = 12;
  GptConfig latent_yarn = latent;
  latent_yarn.q_lora_rank = 0;
  latent_yarn.yarn_rotary_scaling_factor = 40;
  latent_yarn.rope_original_length = 4096;
  latent_yarn.mscale_all_dim = 0.707;
  GptConfig latent_scaled = latent_yarn;
  latent_scaled.rope_attention_factor = 1.3;

  GptConfig sinks = base;
  sinks.add_bias_linear = sinks.attention_sinks = true;
  sinks.activation = ActivationKind::kQuickGeglu;
  sinks.activation_clamp = 7;
  sinks.glu_linear_offset = 1;
  sinks.num_moe_experts = 4;
  sinks.moe_ffn_hidden_size = 128;
  sinks.attention_window = 8;
  sinks.window_attn_skip_freq = {1, 0};
  sinks.yarn_rotary_scaling_factor = 4;
  sinks.rope_original_length = 32;
  sinks.yarn_correction_range_round_to_int = false;
  sinks.rope_attention_factor = 1.13;

  GptConfig hybrid = base;
  hybrid.num_layers = 4;
  hybrid.mixers = {MixerKind::kMamba2, MixerKind::kNone, MixerKind::kAttention, MixerKind::kNone};
  hybrid.mlp_layer_freq = {0, 1, 0, 1};
  hybrid.num_moe_experts = 4;
  hybrid.moe_layer_freq = {0, 0, 0, 1};
  hybrid.moe_ffn_hidden_size = 32;
  hybrid.mamba_state_dim = 16;
  hybrid.mamba_head_dim = 8;
  hybrid.mamba_num_groups = 2;
  hybrid.mamba_num_heads = 16;
  GptConfig parallel = base;
  parallel.mixers = {MixerKind::kAttentionAndMamba2, MixerKind::kAttentionAndMamba2};
  parallel.mlp_layer_freq = {1, 1};
  parallel.mamba_state_dim = 16;
  parallel.mamba_head_dim = 8;
  parallel.mamba_num_groups = 2;
  parallel.mamba_num_heads = 6;
  parallel.mamba_conv_kernel = 3;
  parallel.mamba_conv_bias = parallel.mamba_rms_norm = false;
  parallel.mamba_norm_groups = 1;
  parallel.mamba_norm_before_gate = true;
  parallel.mamba_dt_min = 0.001;
  parallel.mamba_dt_max = 0.1;
  parallel.mamba_multipliers = {1, 2, 3, 4, 5};
  parallel.mamba_in_multiplier = 0.5;
  parallel.mamba_out_multiplier = 0.25;
  parallel.attention_in_multiplier = 0.3;
  parallel.attention_out_multiplier = 0.7;
  parallel.key_multiplier = 0.9;
  parallel.mlp_gate_multiplier = 1.1;
  parallel.mlp_out_multiplier = 1.2;

  for (const GptConfig& config : {experts, latent, latent_yarn, latent_scaled, sinks, hybrid, parallel}) {
    v1::ConfigContainer keys;
    *keys.mutable_model() = ModelKeys(config);
    const absl::StatusOr<GptConfig> read = ::mbridge::ModelOf(keys);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(*read == config) << keys.DebugString();
    if (config.mixers.empty()) continue;
    // The estimates of the keys are the engine's numbers.
    GptModel built(config, nullptr);
    ParameterStore store(config.dtype, DeviceType::kCpu);
    built.DeclareParameters(&store);
    EXPECT_EQ(recipes::CountParameters(keys.model()), store.NumElements());
    const auto flops = static_cast<double>(recipes::FlopsPerToken(keys.model()));
    EXPECT_NEAR(flops, built.FlopsPerToken(), 1e-6 * built.FlopsPerToken());
  }
}

TEST(TrainingPlanTest, HybridPatternsThatSayNothing) {
  const auto problem = [](const std::string& pattern, int64_t layers) -> std::string {
    v1::ModelConfig keys;
    keys.set_num_layers(layers);
    if (!pattern.empty()) keys.set_hybrid_layer_pattern(pattern);
    keys.set_is_hybrid_model(true);
    keys.set_mamba_head_dim(8);
    GptConfig model;
    model.num_layers = layers;
    model.hidden_size = 16;
    std::vector<FieldViolation> problems;
    ReadMixerParts(keys, &model, &problems);
    return problems.empty() ? "" : problems[0].description;
  };
  EXPECT_EQ(problem("M*-", 3), "");
  EXPECT_THAT(problem("", 3), testing::HasSubstr("is missing"));
  EXPECT_THAT(problem("M*", 3), testing::HasSubstr("has 2 letters"));
  EXPECT_THAT(problem("M*x", 3), testing::HasSubstr("the letter x"));
  EXPECT_THAT(problem("M*E", 3), testing::HasSubstr("model.num_moe_experts"));
}

TEST(TrainingPlanTest, PartsOfOtherFamilies) {
  const GptConfig model =
      ModelOf("llama32_1b",
              {"model.qk_layernorm=true", "model.add_qkv_bias=true", "model.window_size=[127,0]", "model.rotary_percent=0.5",
               "model.rope_scaling=false", "model.seq_len_interpolation_factor=4", "model.num_layers=2"});
  EXPECT_TRUE(model.qk_layernorm && model.add_qkv_bias);
  EXPECT_EQ(model.attention_window, 128);
  EXPECT_EQ(model.rotary_percent, 0.5);
  EXPECT_EQ(model.seq_len_interpolation_factor, 4);
}

TEST(TrainingPlanTest, PartsOfTheDenseFamilies) {
  const GptConfig model = ModelOf(
      "llama32_1b", {"model.num_layers=4", "model.activation_func=gelu_pytorch_tanh", "model.post_layernorm=true",
                     "model.layernorm_zero_centered_gamma=true", "model.window_size=[7,0]", "model.window_attn_skip_freq=[4]",
                     "model.no_rope_freq=[0,0,1,0]", "model.softmax_scale=0.25", "model.final_logit_softcapping=30",
                     "model.rotary_base_local=10000", "model.rotary_interleaved=true"});
  EXPECT_EQ(model.activation, ActivationKind::kGegluTanh);
  EXPECT_TRUE(model.pre_layernorm && model.post_layernorm && model.layernorm_zero_centered_gamma && model.rotary_interleaved);
  EXPECT_EQ(model.window_attn_skip_freq, (std::vector<int64_t>{1, 1, 1, 0}));
  EXPECT_EQ(model.no_rope_freq, (std::vector<int64_t>{0, 0, 1, 0}));
  EXPECT_EQ(model.softmax_scale, 0.25);
  EXPECT_EQ(model.attn_logit_softcapping, 0);
  EXPECT_EQ(model.final_logit_softcapping, 30);
  EXPECT_EQ(model.rotary_base_local, 10000);
  const GptConfig yarn = ModelOf("llama32_1b", {"model.num_layers=2", "model.rope_scaling=false",
                                                "model.position_embedding_type=yarn", "model.yarn_rotary_scaling_factor=4"});
  EXPECT_EQ(yarn.position_embedding, PositionKind::kRope);
  EXPECT_EQ(yarn.yarn_rotary_scaling_factor, 4);
  EXPECT_EQ(yarn.rope_original_length, 4096);
  EXPECT_NEAR(yarn.rope_attention_factor, 1.13862943611, 1e-10);
}

// Every part that a family of Hugging Face can have survives as keys of a recipe.
TEST(TrainingPlanTest, ModelPartsThereAndBack) {
  GptConfig model;
  model.num_layers = 2;
  model.position_embedding = PositionKind::kRope;
  model.activation = ActivationKind::kSquaredRelu;
  model.qk_norm_over_projection = model.post_layernorm = model.layernorm_zero_centered_gamma = model.rotary_interleaved = true;
  model.pre_layernorm = false;
  model.window_attn_skip_freq = {1, 0};
  model.no_rope_freq = {0, 1};
  model.softmax_scale = 0.1;
  model.attn_logit_softcapping = 50;
  model.final_logit_softcapping = 30;
  model.embedding_multiplier = 12;
  model.residual_multiplier = 0.22;
  model.logits_scaling = 8;
  model.rotary_base = 5e5;
  model.rotary_base_local = 1e4;
  model.rotary_percent = 0.5;
  GptConfig long_rope = model, yarn = model, llama3 = model, dynamic = model;
  long_rope.long_rope_short_factors = {1, 2};
  long_rope.long_rope_long_factors = {3, 4};
  long_rope.rope_attention_factor = 1.25;
  yarn.yarn_rotary_scaling_factor = 4;
  yarn.rope_original_length = 4096;
  yarn.yarn_beta_fast = 16;
  yarn.yarn_correction_range_round_to_int = false;
  yarn.rope_attention_factor = 1.5;
  llama3.rope_scaling = true;
  llama3.rope_low_freq_factor = 2;
  llama3.rope_original_length = 1024;
  dynamic.rope_dynamic_factor = 2;
  for (const GptConfig& config : {model, long_rope, yarn, llama3, dynamic}) {
    v1::ModelConfig keys;
    WriteActivation(config, &keys);
    WriteModelParts(config, &keys);
    GptConfig read;
    read.num_layers = 2;
    read.position_embedding = PositionKind::kRope;
    std::vector<FieldViolation> problems;
    ReadActivation(keys, &read, &problems);
    ReadModelParts(keys, &read, &problems);
    EXPECT_TRUE(problems.empty());
    EXPECT_TRUE(read == config) << keys.DebugString();
  }
}

}  // namespace
}  // namespace mbridge
