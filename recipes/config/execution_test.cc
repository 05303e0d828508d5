#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"

namespace mbridge::recipes {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<v1::ResolvedConfig> With(const std::string& recipe, std::vector<std::string> overrides,
                                        v1::Device device = v1::DEVICE_UNSPECIFIED) {
  ResolveRequest request;
  request.recipe = recipe;
  request.overrides = std::move(overrides);
  request.device = device;
  return Resolve(request);
}

// The message about `key`.
std::string Problem(const absl::Status& status, const std::string& key) {
  for (const FieldViolation& violation : FieldViolationsOf(status)) {
    if (violation.field == key) return violation.description;
  }
  return std::string(status.message());
}

TEST(ExecutionTest, Recomputation) {
  const std::string full = "model.recompute_granularity=full", selective = "model.recompute_granularity=selective";
  EXPECT_TRUE(With("llama32_1b", {full, "model.recompute_method=block", "model.recompute_num_layers=4"}).ok());
  EXPECT_TRUE(With("llama32_1b", {selective}).ok());
  EXPECT_TRUE(With("llama32_1b", {selective, "model.recompute_modules=[core_attn,mlp,layernorm]"}).ok());
  const auto problem = [&](std::vector<std::string> overrides, const std::string& key) {
    return Problem(With("llama32_1b", std::move(overrides)).status(), key);
  };
  EXPECT_THAT(problem({full}, "model.recompute_method"), HasSubstr("allowed: uniform, block"));
  EXPECT_THAT(problem({full, "model.recompute_method=uniform"}, "model.recompute_num_layers"), HasSubstr("1 .. 16"));
  EXPECT_THAT(problem({full, "model.recompute_method=uniform", "model.recompute_num_layers=17"}, "model.recompute_num_layers"),
              HasSubstr("is 17"));
  EXPECT_THAT(problem({selective, "model.recompute_method=uniform"}, "model.recompute_method"), HasSubstr("full"));
  EXPECT_THAT(problem({selective, "model.recompute_modules=[attention]"}, "model.recompute_modules"),
              HasSubstr("core_attn, mlp"));
  EXPECT_THAT(problem({selective, "model.recompute_modules=[moe]"}, "model.recompute_modules"), HasSubstr("num_moe_experts"));
  EXPECT_THAT(problem({selective, "model.recompute_modules=[mla_up_proj]"}, "model.recompute_modules"), HasSubstr("latent"));
}

TEST(ExecutionTest, GraphsAreRefusedWithTheReason) {
  EXPECT_TRUE(With("llama32_1b", {"model.cuda_graph_impl=local"}).ok());
  EXPECT_TRUE(With("llama32_1b", {"model.cuda_graph_impl=full_iteration", "model.deterministic_mode=true"}).ok());
  const auto message = [](const std::string& recipe, std::vector<std::string> overrides) {
    return std::string(With(recipe, std::move(overrides)).status().message());
  };
  EXPECT_THAT(message("llama32_1b", {"model.cuda_graph_impl=transformer_engine"}), HasSubstr("accepted: none, local"));
  EXPECT_THAT(message("llama32_1b", {"model.cuda_graph_impl=local", "model.tensor_model_parallel_size=2"}),
              HasSubstr("model.tensor_model_parallel_size=1"));
  EXPECT_THAT(message("deepseek_v2_lite", {"model.expert_model_parallel_size=1", "model.cuda_graph_impl=local"}),
              HasSubstr("a model without experts"));
}

TEST(ExecutionTest, EstimatesAreForADevice) {
  const std::vector<std::string> overrides = {"model.seq_length=8192", "dataset.seq_length=8192"};
  const auto cpu = With("llama32_1b", overrides, v1::DEVICE_CPU), cuda = With("llama32_1b", overrides, v1::DEVICE_CUDA);
  ASSERT_TRUE(cpu.ok() && cuda.ok());
  EXPECT_GT(cpu->per_rank().activation_bytes(), 3 * cuda->per_rank().activation_bytes()) << "scores are kept on a CPU only";
  EXPECT_EQ(cpu->per_rank().runtime_bytes(), 0);
  EXPECT_GT(cuda->per_rank().runtime_bytes(), 0);
  std::vector<std::string> again = overrides;
  again.insert(again.end(),
               {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"});
  const auto less = With("llama32_1b", again, v1::DEVICE_CUDA);
  ASSERT_TRUE(less.ok()) << less.status();
  EXPECT_LT(less->per_rank().activation_bytes(), cuda->per_rank().activation_bytes() / 4);
}

}  // namespace
}  // namespace mbridge::recipes
