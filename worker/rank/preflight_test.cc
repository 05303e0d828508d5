// What the check of a node refuses before a rank, and with it a GPU, is taken.
#include "worker/rank/preflight.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/core/gpu_architectures.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"

namespace mbridge {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Overrides = std::vector<std::string>;

recipes::ResolveRequest Request(const Overrides& more, v1::Device device) {
  recipes::ResolveRequest request;
  request.recipe = "vanilla_gpt";
  request.overrides = {"model.hidden_size=64",        "model.num_attention_heads=4", "model.ffn_hidden_size=128",
                       "model.seq_length=64",         "dataset.seq_length=64",       "train.micro_batch_size=2",
                       "train.global_batch_size=4",   "tokenizer.vocab_size=1000",   "train.train_iters=4",
                       "scheduler.lr_warmup_iters=0", "scheduler.lr_decay_iters=4",  "optimizer.lr=1e-3",
                       "model.normalization=RMSNorm", "model.add_bias_linear=false", "model.position_embedding_type=rope",
                       "model.activation_func=silu",  "model.gated_linear_unit=true"};
  for (const std::string& line : more) {
    const std::string key = line.substr(0, line.find('=') + 1);
    std::erase_if(request.overrides, [&key](const std::string& old) { return old.starts_with(key); });
    request.overrides.push_back(line);
  }
  request.ranks = 1;
  request.device = device;
  return request;
}

v1::RankSpec Spec(const Overrides& more, v1::Device device, int64_t gpu_memory) {
  recipes::ResolveRequest request = Request(more, device);
  request.require_trainable = false;  // What the node itself refuses.
  const auto resolved = recipes::Resolve(request);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  v1::RankSpec spec;
  if (resolved.ok()) *spec.mutable_resolved() = *resolved;
  spec.set_world_size(1);
  spec.set_device(device);
  spec.set_gpu_memory_bytes(gpu_memory);
  return spec;
}

const Overrides& Hybrid() {
  static const Overrides kLines = {"model.num_layers=3",      "model.is_hybrid_model=true", "model.hybrid_layer_pattern=M*-",
                                   "model.mamba_state_dim=8", "model.mamba_head_dim=8",     "model.mamba_num_groups=2",
                                   "model.mamba_num_heads=8"};
  return kLines;
}
const Overrides& Delta() {
  static const Overrides kLines = {"model.num_layers=4",
                                   "model.experimental_attention_variant=gated_delta_net",
                                   "model.linear_attention_freq=4",
                                   "model.linear_key_head_dim=8",
                                   "model.linear_value_head_dim=8",
                                   "model.linear_num_key_heads=2",
                                   "model.linear_num_value_heads=4"};
  return kLines;
}

// In the words of a submit that asks for a GPU.
TEST(PreflightTest, PartsWithoutCudaOperatorsStayOnCpus) {
  const std::pair<Overrides, const char*> cases[] = {
      {Hybrid(), "a Mamba-2 mixer (M or P in model.hybrid_layer_pattern)"},
      {Delta(), "a gated delta net (model.linear_attention_freq)"},
      {{"model.num_layers=2", "model.attention_output_gate=true"}, "an output gate of attention (model.attention_output_gate)"},
      {{"model.num_layers=2", "model.mlp_gate_multiplier=0.5"}, "a factor of the MLP's gate (model.mlp_gate_multiplier)"},
      {{"model.num_layers=2", "model.num_moe_experts=64", "model.moe_router_topk=33"}, "model.moe_router_topk is 33"}};
  for (const auto& [lines, part] : cases) {
    const v1::PreflightResult on_gpu = CheckNode(Spec(lines, v1::DEVICE_CUDA, int64_t{100} << 30));
    ASSERT_EQ(on_gpu.problems_size(), 1) << on_gpu.DebugString();
    EXPECT_EQ(on_gpu.problems(0).reason(), v1::REASON_UNSUPPORTED_MODEL);
    EXPECT_THAT(on_gpu.problems(0).description(), AllOf(HasSubstr(part), HasSubstr("--device cpu")));
    const absl::Status at_submit = recipes::Resolve(Request(lines, v1::DEVICE_CUDA)).status();
    EXPECT_EQ(ReasonOf(at_submit), v1::REASON_UNSUPPORTED_MODEL);
    EXPECT_EQ(at_submit.message(), on_gpu.problems(0).description());
    EXPECT_TRUE(recipes::Resolve(Request(lines, v1::DEVICE_UNSPECIFIED)).ok());
    const v1::PreflightResult on_cpu = CheckNode(Spec(lines, v1::DEVICE_CPU, 0));
    EXPECT_EQ(on_cpu.problems_size(), 0) << on_cpu.DebugString();
    EXPECT_GT(on_cpu.memory().activation_bytes(), 0);
  }
}

TEST(PreflightTest, AJobThatDoesNotFitIsRefusedWithWhatDoes) {
  const v1::PreflightResult result = CheckNode(
      Spec({"model.num_layers=2", "model.seq_length=8192", "dataset.seq_length=8192"}, v1::DEVICE_CUDA, int64_t{2} << 30));
  ASSERT_EQ(result.problems_size(), 1) << result.DebugString();
  EXPECT_EQ(result.problems(0).reason(), v1::REASON_OUT_OF_MEMORY);
  EXPECT_EQ(result.problems(0).field(), "train.micro_batch_size");
  EXPECT_THAT(result.problems(0).description(), AllOf(HasSubstr("What fits:"), HasSubstr("train.micro_batch_size=1")));
}

TEST(PreflightTest, AMicroBatchOfOneIsNotBlamedAndGpusThatAreMissingAreNamed) {
  v1::RankSpec spec =
      Spec({"model.num_layers=2", "model.seq_length=16384", "dataset.seq_length=16384", "train.micro_batch_size=1"},
           v1::DEVICE_CUDA, int64_t{7} << 30);
  spec.set_gpus(1);
  const v1::PreflightResult result = CheckNode(spec);
  ASSERT_EQ(result.problems_size(), 1) << result.DebugString();
  EXPECT_EQ(result.problems(0).reason(), v1::REASON_OUT_OF_MEMORY);
  EXPECT_EQ(result.problems(0).field(), "model");
  EXPECT_THAT(result.problems(0).description(), HasSubstr(" GPUs, 1 is here)"));
}

TEST(PreflightTest, AFileWhereCheckpointsShouldGoIsFoundBeforeTheTraining) {
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / fmt::format("preflight-{}", getpid());
  std::ofstream(file) << "not a directory";
  v1::RankSpec spec = Spec({"model.num_layers=2"}, v1::DEVICE_CPU, 0);
  spec.set_checkpoint_directory(file / "checkpoints");
  const v1::PreflightResult result = CheckNode(spec);
  std::filesystem::remove(file);
  ASSERT_EQ(result.problems_size(), 1) << result.DebugString();
  EXPECT_EQ(result.problems(0).field(), "checkpoint.save");
  EXPECT_THAT(result.problems(0).description(), HasSubstr(file.string() + " is not a directory"));
  EXPECT_EQ(CheckNode(Spec({"model.num_layers=2"}, v1::DEVICE_CPU, 0)).problems_size(), 0);
}

TEST(PreflightTest, AGpuWithoutKernelsIsRefusedBeforeItIsTaken) {
  if (BuiltGpuArchitectures().empty()) GTEST_SKIP() << "this build has no CUDA code";
  v1::RankSpec spec = Spec({"model.num_layers=2"}, v1::DEVICE_CUDA, int64_t{40} << 30);
  spec.mutable_gpu()->set_name("Tesla V100");
  EXPECT_EQ(CheckNode(spec).problems_size(), 0);  // Its capability is not known.
  spec.mutable_gpu()->set_compute_capability(70);
  const v1::PreflightResult result = CheckNode(spec);
  ASSERT_EQ(result.problems_size(), 1) << result.DebugString();
  EXPECT_EQ(result.problems(0).reason(), v1::REASON_NOT_ENOUGH_RESOURCES);
  EXPECT_EQ(result.problems(0).field(), "spec.device");
  EXPECT_THAT(result.problems(0).description(),
              AllOf(HasSubstr("Tesla V100 has compute capability 7.0; this build has kernels for"), HasSubstr("--device cpu")));
}

}  // namespace
}  // namespace mbridge
