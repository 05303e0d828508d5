#include "engine/train/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "engine/ops/flash_attention.h"
#include "engine/ops/gemm.h"
#include "engine/train/train_state.h"
#include "proto/format/memory_table.h"
#include "recipes/config/resolve.h"

namespace mbridge {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using Overrides = std::vector<std::string>;

v1::ResolvedConfig Resolved(const std::string& recipe, const Overrides& overrides, int ranks, v1::Device device) {
  recipes::ResolveRequest request;
  request.recipe = recipe;
  request.overrides = overrides;
  request.ranks = ranks;
  request.device = device;
  const auto resolved = recipes::Resolve(request);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  return resolved.ok() ? *resolved : v1::ResolvedConfig();
}

TrainingPlan PlanOf(const v1::ResolvedConfig& resolved, DeviceType device) {
  auto plan = MakeTrainingPlan(resolved);
  EXPECT_TRUE(plan.ok()) << plan.status();
  plan->device = device;
  return *plan;
}

// As a submit with these lines more would be resolved.
LayoutResolver Submitted(const v1::ResolvedConfig& resolved) {
  return [&resolved](const Overrides& lines, int ranks) { return recipes::ResolveAgain(resolved, lines, ranks); };
}

// `more` in place of what `list` says of the same keys.
Overrides With(Overrides list, const Overrides& more) {
  for (const std::string& line : more) {
    std::erase_if(list, [&](const std::string& old) { return old.starts_with(line.substr(0, line.find('=') + 1)); });
    list.push_back(line);
  }
  return list;
}

Overrides Small(const Overrides& more) {
  Overrides overrides = {"model.num_layers=4",        "model.hidden_size=128",       "model.num_attention_heads=4",
                         "model.ffn_hidden_size=512", "model.seq_length=256",        "dataset.seq_length=256",
                         "train.micro_batch_size=2",  "train.global_batch_size=8",   "tokenizer.vocab_size=1000",
                         "train.train_iters=10",      "scheduler.lr_warmup_iters=1", "scheduler.lr_decay_iters=10"};
  return With(overrides, more);
}

TEST(MemoryPlanTest, IsWhatTheEngineAllocates) {
  const std::vector<Overrides> cases = {
      {},
      {"mixed_precision=null", "model.hidden_dropout=0"},
      {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=2"},
      {"model.recompute_granularity=selective", "model.recompute_modules=[core_attn,mlp]"},
      {"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"},
      {"mixed_precision=bf16_with_fp8_current_scaling_mixed"},
      {"mixed_precision=bf16_with_fp8_subchannel_scaling_mixed"},
      {"mixed_precision=bf16_with_mxfp8_mixed"}};
  for (const Overrides& more : cases) {
    const v1::ResolvedConfig resolved = Resolved("vanilla_gpt", Small(more), 1, v1::DEVICE_CPU);
    const TrainingPlan plan = PlanOf(resolved, DeviceType::kCpu);
    const v1::MemoryEstimate memory = PlanMemory(plan);
    const auto world = MakeSelfCommunicator();
    const ParallelGroups groups(plan.parallel, world.get());
    TrainState state(plan, {}, groups);
    state.InitializeFresh();
    EXPECT_EQ(memory.gradient_bytes(), state.parameters().capacity() * static_cast<int64_t>(sizeof(float)));
    EXPECT_EQ(memory.optimizer_bytes(), state.optimizer().StateBytes());
    EXPECT_EQ(memory.parameters(), state.parameters().NumGlobalElements());
    const int64_t copies = memory.weight_bytes() - state.parameters().capacity() * static_cast<int64_t>(SizeOf(plan.model.dtype));
    EXPECT_NEAR(static_cast<double>(memory.activation_bytes() + memory.workspace_bytes() + copies),
                static_cast<double>(state.model().ActivationBytes()), 2048);
    EXPECT_EQ(memory.runtime_bytes(), 0);
  }
}

// The formulas that clients print follow the engine's plan on both devices.
TEST(MemoryPlanTest, EstimatesFollowIt) {
  struct Case {
    std::string recipe;
    Overrides overrides;
    int ranks;
  };
  const Overrides aware = {"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16",
                           "optimizer.exp_avg_sq_dtype=bf16"};
  const Overrides one = {"train.micro_batch_size=1", "model.seq_length=8192", "dataset.seq_length=8192",
                         "model.vocab_size=128256"};
  const Overrides full = {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"};
  const Overrides shape = {"model.hidden_size=512",       "model.num_attention_heads=8", "model.num_query_groups=2",
                           "model.kv_channels=64",        "model.ffn_hidden_size=1024",  "model.seq_length=1024",
                           "dataset.seq_length=1024",     "tokenizer.vocab_size=8192",   "model.normalization=RMSNorm",
                           "model.add_bias_linear=false", "model.activation_func=silu",  "model.gated_linear_unit=true",
                           "train.micro_batch_size=2",    "train.global_batch_size=8",   "model.num_layers=8"};
  const Overrides delta =
      With(shape, {"model.experimental_attention_variant=gated_delta_net", "model.linear_attention_freq=4",
                   "model.linear_key_head_dim=64", "model.linear_value_head_dim=128", "model.linear_num_key_heads=4",
                   "model.linear_num_value_heads=8", "model.linear_conv_kernel_dim=4", "model.attention_output_gate=true",
                   "model.qk_layernorm=true", "model.position_embedding_type=rope"});
  const Overrides mamba =
      With(shape, {"model.is_hybrid_model=true", "model.hybrid_layer_pattern=MM*-MPMM", "model.mamba_state_dim=64",
                   "model.mamba_head_dim=64", "model.mamba_num_groups=2", "model.position_embedding_type=none"});
  const std::vector<Case> cases = {
      {"llama32_1b", one, 1},
      {"llama32_1b", With(one, full), 1},
      {"llama32_1b", With(one, {"ddp.use_distributed_optimizer=true"}), 2},
      {"llama32_1b", With(one, {"model.recompute_granularity=selective", "model.recompute_modules=[mlp,layernorm]"}), 1},
      {"llama3_8b", With(With(one, aware), {"model.context_parallel_size=1"}), 1},
      {"llama3_8b",
       With(With(one, aware),
            {"model.context_parallel_size=1", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"}),
       2},
      {"llama3_8b",
       With(one, {"model.context_parallel_size=1", "model.recompute_granularity=full", "model.recompute_method=block",
                  "model.recompute_num_layers=16"}),
       1},
      {"llama3_8b",
       With(With(one, aware), {"model.context_parallel_size=1", "mixed_precision=bf16_with_fp8_current_scaling_mixed"}), 1},
      {"llama3_8b",
       With(With(one, aware), {"model.context_parallel_size=1", "model.tensor_model_parallel_size=2",
                               "model.sequence_parallel=true", "mixed_precision=bf16_with_fp8_delayed_scaling_mixed"}),
       2},
      {"llama32_1b", With(one, {"mixed_precision=bf16_with_fp8_subchannel_scaling_mixed"}), 1},
      {"llama32_1b", With(one, {"mixed_precision=bf16_with_mxfp8_mixed"}), 1},
      {"vanilla_gpt", Small({}), 1},
      {"vanilla_gpt", Small({"model.recompute_granularity=selective"}), 1},
      {"from_hf", delta, 1},
      {"from_hf",
       With(delta, {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=2"}), 1},
      {"from_hf", With(delta, {"model.num_layers=3", "model.linear_attention_freq=[1,1,1]"}), 1},
      {"from_hf", mamba, 1},
      {"vanilla_gpt", Small({"model.hidden_dropout=0", "model.attention_dropout=0", "mixed_precision=null"}), 1},
  };
  g_flash_attention_backend = [] { return std::string(); };  // As where the CUDA code is linked in.
  for (const Case& test : cases) {
    for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
      const bool cuda = device == DeviceType::kCuda;
      if (!cuda && NativeBF16Products()) continue;     // The formulas take a CPU that computes in fp32.
      const bool cpu_only = test.recipe == "from_hf";  // Mixers without CUDA operators.
      if (cuda && cpu_only) continue;
      const v1::ResolvedConfig resolved =
          Resolved(test.recipe, test.overrides, test.ranks, cuda ? v1::DEVICE_CUDA : v1::DEVICE_CPU);
      const v1::MemoryEstimate planned = PlanMemory(PlanOf(resolved, device)), &estimate = resolved.per_rank();
      const auto total = static_cast<double>(TotalBytes(planned));
      EXPECT_NEAR(static_cast<double>(TotalBytes(estimate)), total, 0.03 * total)
          << test.recipe << (cuda ? " on a GPU" : " on a CPU") << "\nplanned   " << MemoryLine(planned) << "\nestimated "
          << MemoryLine(estimate) << "\n"
          << ::testing::PrintToString(test.overrides);
    }
  }
  g_flash_attention_backend = nullptr;
}

// What an H200 said at the end of the runs of docs/benchmarks.md: plan and estimate within 10 %.
TEST(MemoryPlanTest, PlanAndEstimateAreNearTheMeasuredUse) {
  const Overrides long_batch = {"model.seq_length=8192", "dataset.seq_length=8192", "train.micro_batch_size=1",
                                "model.vocab_size=128256"};
  const auto with = [](Overrides list, const Overrides& more) {
    list.insert(list.end(), more.begin(), more.end());
    return list;
  };
  const Overrides narrow = {"model.context_parallel_size=1", "optimizer.use_precision_aware_optimizer=true",
                            "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"};
  struct Row {
    std::string recipe;
    Overrides overrides;
    int ranks;
    int64_t measured;  // MiB.
  };
  const std::vector<Row> rows = {
      {"llama32_1b", with(long_batch, {"train.global_batch_size=8"}), 1, 34236},
      {"llama3_8b", with(with(long_batch, narrow), {"train.global_batch_size=16"}), 1, 131048},
      {"llama3_8b",
       with(with(long_batch, narrow), {"train.global_batch_size=16", "mixed_precision=bf16_with_fp8_current_scaling_mixed"}), 1,
       139770},
      {"vanilla_gpt",
       {"model.num_layers=12", "model.hidden_size=768", "model.num_attention_heads=12", "model.ffn_hidden_size=3072",
        "model.seq_length=1024", "dataset.seq_length=1024", "train.micro_batch_size=64", "train.global_batch_size=512",
        "model.vocab_size=50304", "model.hidden_dropout=0", "model.attention_dropout=0"},
       1,
       24990},
      {"vanilla_gpt_megatron_lm_config",
       {"model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4", "model.ffn_hidden_size=1024",
        "model.seq_length=512", "dataset.seq_length=512", "train.global_batch_size=32", "train.micro_batch_size=4",
        "model.hidden_dropout=0", "model.attention_dropout=0"},
       1,
       1018},
      {"vanilla_gpt",
       {"model.num_layers=4", "model.hidden_size=256", "model.num_attention_heads=4", "model.ffn_hidden_size=1024",
        "model.seq_length=1024", "dataset.seq_length=1024", "train.global_batch_size=16", "train.micro_batch_size=2",
        "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"},
       2,
       1866},
  };
  g_flash_attention_backend = [] { return std::string(); };
  for (const Row& row : rows) {
    const v1::ResolvedConfig resolved = Resolved(row.recipe, row.overrides, row.ranks, v1::DEVICE_CUDA);
    const v1::MemoryEstimate planned = PlanMemory(PlanOf(resolved, DeviceType::kCuda));
    const auto measured = static_cast<double>(row.measured);
    const std::string what = row.recipe + " " + ::testing::PrintToString(row.overrides);
    EXPECT_NEAR(static_cast<double>(TotalBytes(planned) >> 20), measured, 0.1 * measured)
        << what << "\nplanned   " << MemoryLine(planned);
    EXPECT_NEAR(static_cast<double>(TotalBytes(resolved.per_rank()) >> 20), measured, 0.1 * measured)
        << what << "\nestimated " << MemoryLine(resolved.per_rank());
  }
  g_flash_attention_backend = nullptr;
}

TEST(MemoryPlanTest, SaysWhatFits) {
  const Overrides overrides = {"train.micro_batch_size=2",          "train.global_batch_size=16",    "model.seq_length=8192",
                               "dataset.seq_length=8192",           "model.context_parallel_size=1", "model.vocab_size=128256",
                               "model.tensor_model_parallel_size=1"};
  g_flash_attention_backend = [] { return std::string(); };
  const v1::ResolvedConfig resolved = Resolved("llama3_8b", overrides, 1, v1::DEVICE_CUDA);
  const TrainingPlan plan = PlanOf(resolved, DeviceType::kCuda);
  const int64_t h200 = int64_t{143771} << 20;
  EXPECT_EQ(WhyTooLarge(resolved, Submitted(resolved), plan, {int64_t{1} << 40}), "");
  const std::string why = WhyTooLarge(resolved, Submitted(resolved), plan, {h200});
  EXPECT_THAT(why, AllOf(HasSubstr("143771 MiB"), HasSubstr("main gradients"), HasSubstr("What fits:")));
  const std::vector<std::string> layouts = LayoutsThatFit(resolved, Submitted(resolved), DeviceType::kCuda, {h200});
  EXPECT_THAT(layouts, Contains(HasSubstr("--ranks 2 model.tensor_model_parallel_size=2 model.sequence_parallel=true")));
  EXPECT_THAT(layouts, Contains(HasSubstr("optimizer.exp_avg_dtype=bf16")));
  EXPECT_THAT(layouts, Contains(HasSubstr("--ranks 2 train.micro_batch_size=1 (")));  // Its optimizer is sharded already.
  EXPECT_THAT(LayoutsThatFit(resolved, Submitted(resolved), DeviceType::kCuda, {int64_t{1} << 30}),
              testing::ElementsAre(HasSubstr("smaller model")));
  g_flash_attention_backend = nullptr;
}

// What a line proposes: "[--ranks N] KEY=VALUE ... (NEED MiB a rank)".
struct Proposal {
  int ranks = 0;
  Overrides overrides;
  int64_t mebibytes = 0;
};

Proposal Parse(const std::string& line, int ranks) {
  Proposal proposal;
  proposal.ranks = ranks;
  std::istringstream words(line);
  for (std::string word; words >> word && word.front() != '(';) {
    if (word == "--ranks") {
      words >> proposal.ranks;
    } else {
      proposal.overrides.push_back(word);
    }
  }
  proposal.mebibytes = std::stoll(line.substr(line.rfind('(') + 1));
  return proposal;
}

// Lines that nobody here can start come last and say so.
TEST(MemoryPlanTest, ProposesFirstWhatTheGpusThatAreThereCanRun) {
  const Overrides overrides = {"train.micro_batch_size=2",          "train.global_batch_size=16",    "model.seq_length=8192",
                               "dataset.seq_length=8192",           "model.context_parallel_size=1", "model.vocab_size=128256",
                               "model.tensor_model_parallel_size=1"};
  g_flash_attention_backend = [] { return std::string(); };
  const v1::ResolvedConfig resolved = Resolved("llama3_8b", overrides, 1, v1::DEVICE_CUDA);
  const auto layouts = [&](int gpus) {
    return LayoutsThatFit(resolved, Submitted(resolved), DeviceType::kCuda, {int64_t{143155} << 20, gpus});
  };
  for (const int gpus : {1, 2}) {
    int runnable = 0, lacking = 0;
    for (const std::string& line : layouts(gpus)) {
      const int ranks = Parse(line, 1).ranks;
      if (ranks > gpus) {
        ++lacking;
        EXPECT_THAT(line,
                    HasSubstr(fmt::format(" MiB a rank; needs {} GPUs, {} {} here)", ranks, gpus, gpus == 1 ? "is" : "are")));
      } else {
        ++runnable;
        EXPECT_EQ(lacking, 0) << line;
        EXPECT_THAT(line, HasSubstr(" MiB a rank)"));
      }
    }
    EXPECT_GT(runnable, 0) << gpus;
    if (gpus == 1) EXPECT_GT(lacking, 0);
  }
  for (const std::string& line : layouts(0)) EXPECT_THAT(line, HasSubstr(" MiB a rank)"));
  g_flash_attention_backend = nullptr;
}

// Each line, typed as it stands behind the command that was refused, is accepted and fits.
TEST(MemoryPlanTest, WhatItProposesIsAccepted) {
  struct Case {
    const char* recipe;
    Overrides overrides;
    int ranks;
    int64_t gibibytes;
  };
  const Overrides lite = {"model.expert_model_parallel_size=1", "model.recompute_granularity=null", "model.recompute_method=null",
                          "model.recompute_num_layers=null"};
  const std::vector<Case> cases = {
      {"deepseek_v2_lite", {"model.expert_model_parallel_size=1"}, 1, 140},
      {"deepseek_v2_lite", lite, 1, 140},
      {"deepseek_v2_lite", With(lite, {"train.micro_batch_size=2"}), 2, 140},
      {"deepseek_v2_lite", lite, 4, 80},
      {"llama3_8b", {"model.context_parallel_size=1", "model.tensor_model_parallel_size=1", "train.micro_batch_size=4"}, 2, 80},
      {"llama3_8b",
       {"model.context_parallel_size=1", "model.tensor_model_parallel_size=1", "ddp.use_distributed_optimizer=false",
        "optimizer.use_distributed_optimizer=false"},
       1,
       140},
      // Their proposals may not have several tensor-parallel ranks, because of groups, CUDA graphs or gated delta nets.
      {"vanilla_gpt", Small({"model.num_query_groups=1", "model.seq_length=4096", "dataset.seq_length=4096"}), 1, 2},
      {"vanilla_gpt", Small({"model.cuda_graph_impl=local", "model.seq_length=4096", "dataset.seq_length=4096"}), 1, 2},
  };
  g_flash_attention_backend = [] { return std::string(); };
  for (const Case& test : cases) {
    SCOPED_TRACE(std::string(test.recipe) + " " + ::testing::PrintToString(test.overrides));
    const v1::ResolvedConfig resolved = Resolved(test.recipe, test.overrides, test.ranks, v1::DEVICE_CUDA);
    const int64_t available = test.gibibytes << 30;
    EXPECT_GT(TotalBytes(PlanMemory(PlanOf(resolved, DeviceType::kCuda))), available);
    std::vector<std::string> layouts = LayoutsThatFit(resolved, Submitted(resolved), DeviceType::kCuda, {available});
    if (resolved.config().model().num_moe_experts() > 0) {
      EXPECT_THAT(layouts.back(), AllOf(HasSubstr("tensor-parallel ranks a part of each"), HasSubstr("would not shrink them")));
      layouts.pop_back();
    }
    ASSERT_FALSE(layouts.empty());
    for (const std::string& line : layouts) {
      ASSERT_THAT(line, HasSubstr(" MiB a rank)"));
      const Proposal proposal = Parse(line, test.ranks);
      const v1::ResolvedConfig accepted =
          Resolved(test.recipe, With(test.overrides, proposal.overrides), proposal.ranks, v1::DEVICE_CUDA);
      const int64_t need = TotalBytes(PlanMemory(PlanOf(accepted, DeviceType::kCuda)));
      EXPECT_LE(need, available) << line;
      EXPECT_EQ(need >> 20, proposal.mebibytes) << line;
    }
  }
  g_flash_attention_backend = nullptr;
}

TEST(MemoryPlanTest, SaysThatExpertsDoNotFit) {
  const v1::ResolvedConfig experts = Resolved("deepseek_v2_lite", {"model.expert_model_parallel_size=1"}, 1, v1::DEVICE_CUDA);
  const std::string why = WhyTooLarge(experts, Submitted(experts), PlanOf(experts, DeviceType::kCuda), {int64_t{143771} << 20});
  // 26 layers of 64 experts of 3 * 2048 * 1408 weights, each with 2 bytes of its own, 4 of its gradient and 12 of its state.
  const int64_t bytes = int64_t{26} * 64 * 3 * 2048 * 1408 * 18;
  const std::string::size_type said = why.find("its experts alone take ");
  ASSERT_NE(said, std::string::npos) << why;
  EXPECT_NEAR(static_cast<double>(std::stoll(why.substr(said + 23))), static_cast<double>(bytes >> 20),
              1e-3 * static_cast<double>(bytes >> 20));
  EXPECT_THAT(why, HasSubstr("model.tensor_model_parallel_size="));
}

}  // namespace
}  // namespace mbridge
