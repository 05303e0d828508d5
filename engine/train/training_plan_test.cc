#include "engine/train/training_plan.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace mbridge
