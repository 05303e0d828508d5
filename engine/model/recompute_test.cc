// Recomputation changes memory and nothing else: losses, gradients and the streams' positions are equal to the bit.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"

namespace mbridge {
namespace {

GptConfig Base() {
  GptConfig config;
  config.num_layers = 5;
  config.hidden_size = 32;
  config.num_attention_heads = config.num_query_groups = 4;
  config.kv_channels = 8;
  config.ffn_hidden_size = 64;
  config.seq_length = config.max_position_embeddings = 24;
  config.padded_vocab_size = 64;
  config.init_method_std = 0.2;
  config.hidden_dropout = config.attention_dropout = 0.2;
  config.dtype = DType::kF32;
  return config;
}

GptConfig Llama() {
  GptConfig config = Base();
  config.normalization = NormKind::kRmsNorm;
  config.activation = ActivationKind::kSwiGlu;
  config.position_embedding = PositionKind::kRope;
  config.add_bias_linear = config.tied_embeddings = false;
  return config;
}

GptConfig Experts() {
  GptConfig config = Llama();
  config.num_moe_experts = 4;
  config.moe_ffn_hidden_size = 16;
  config.moe_layer_freq = {0, 1, 1, 0, 1};
  config.moe_shared_expert_intermediate_size = 16;
  config.moe_router_topk = 2;
  config.moe_router_score = RouterScore::kSigmoid;
  config.moe_router_enable_expert_bias = true;
  config.moe_load_balancing = LoadBalancing::kSequence;
  config.moe_aux_loss_coeff = 0.1;
  config.moe_z_loss_coeff = 0.01;
  return config;
}

GptConfig Latent() {
  GptConfig config = Llama();
  config.multi_latent_attention = true;
  config.q_lora_rank = 20;
  config.kv_lora_rank = 16;
  config.qk_head_dim = 8;
  config.qk_pos_emb_head_dim = 4;
  config.kv_channels = 12;
  config.v_head_dim = 8;
  return config;
}

// A Mamba-2 mixer, attention, an MLP, both mixers side by side and experts.
GptConfig Hybrid() {
  GptConfig config = Experts();
  config.mixers = {MixerKind::kMamba2, MixerKind::kAttention, MixerKind::kNone, MixerKind::kAttentionAndMamba2, MixerKind::kNone};
  config.mlp_layer_freq = {0, 0, 1, 1, 1};
  config.moe_layer_freq = {0, 0, 0, 0, 1};
  config.mamba_state_dim = 8;
  config.mamba_head_dim = 8;
  config.mamba_num_groups = 2;
  config.mamba_num_heads = 8;
  return config;
}

// Gated delta nets, one layer of attention with an output gate, experts.
GptConfig Delta() {
  GptConfig config = Experts();
  config.mixers = std::vector<MixerKind>(5, MixerKind::kGatedDeltaNet);
  config.mixers[3] = MixerKind::kAttention;
  config.qk_layernorm = config.attention_output_gate = config.moe_shared_expert_gate = true;
  config.linear_key_head_dim = 8;
  config.linear_value_head_dim = 12;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  return config;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> gradients, expert_biases;
  RngStreams::State streams;
  int64_t bytes = 0;
};

// Two training microbatches and an evaluation between them.
Outcome Run(const GptConfig& config) {
  constexpr int kRows = 2;
  GptModel model(config, nullptr);
  ParameterStore store(config.dtype, DeviceType::kCpu);
  model.DeclareParameters(&store);
  const GptModel::MemoryPlan plan = model.PlanMemory(store, kRows);
  store.Allocate();
  EXPECT_EQ(store.PlannedElements(), store.values().size());
  RngStreams streams(5);
  model.InitializeWeights(&store, &streams);
  model.Prepare(store, kRows);
  Outcome outcome;
  outcome.bytes = model.ActivationBytes();
  const int64_t planned = plan.activations + plan.scratch + plan.weight_copies;
  EXPECT_NEAR(static_cast<double>(planned), static_cast<double>(outcome.bytes), 1024);
  std::mt19937 engine(1);
  for (int i = 0; i < 3; ++i) {
    std::vector<int32_t> tokens, labels, positions;
    std::vector<float> mask;
    for (int64_t t = 0; t < kRows * config.seq_length; ++t) {
      tokens.push_back(static_cast<int32_t>(engine() % config.padded_vocab_size));
      labels.push_back(static_cast<int32_t>(engine() % config.padded_vocab_size));
      positions.push_back(static_cast<int32_t>(t % config.seq_length));
      mask.push_back(1);
    }
    const GptModel::LossSum sum =
        i == 1 ? model.Evaluate(tokens.data(), labels.data(), mask.data(), positions.data())
               : model.ForwardBackward(tokens.data(), labels.data(), mask.data(), positions.data(), 0.5f, &streams);
    outcome.losses.push_back(sum.loss_sum);
  }
  model.UpdateExpertBiases(nullptr);
  const float* gradients = store.main_grads().as<float>();
  outcome.gradients.assign(gradients, gradients + store.main_grads().size());
  for (const Parameter& parameter : store.parameters()) {
    if (parameter.spec.trainable) continue;
    const float* values = parameter.value.as<float>();
    outcome.expert_biases.insert(outcome.expert_biases.end(), values, values + parameter.value.size());
  }
  outcome.streams = streams.Save();
  return outcome;
}

// Less memory by at least `less` of what is kept without recomputation.
void ExpectSame(const GptConfig& config, const GptConfig& recomputed, double less) {
  const Outcome kept = Run(config), again = Run(recomputed);
  EXPECT_EQ(again.losses, kept.losses);
  EXPECT_EQ(again.gradients, kept.gradients);
  EXPECT_EQ(again.expert_biases, kept.expert_biases);
  EXPECT_EQ(again.streams, kept.streams);
  EXPECT_LE(static_cast<double>(again.bytes), static_cast<double>(kept.bytes) * (1 - less));
}

GptConfig Full(GptConfig config, Recompute method, int64_t layers) {
  config.recompute = method;
  config.recompute_num_layers = layers;
  return config;
}

GptConfig Selective(GptConfig config, const RecomputeModules& modules) {
  config.recompute = Recompute::kSelective;
  config.recompute_modules = modules;
  return config;
}

TEST(RecomputeTest, WholeLayers) {
  for (const GptConfig& config : {Base(), Llama(), Experts(), Latent()}) {
    ExpectSame(config, Full(config, Recompute::kUniform, 1), 0.3);
    ExpectSame(config, Full(config, Recompute::kUniform, 2), 0.2);
    ExpectSame(config, Full(config, Recompute::kBlock, 3), 0.2);
  }
}

// Of so few layers, each of another kind, the largest group is most.
TEST(RecomputeTest, WholeLayersWithOtherMixers) {
  for (GptConfig config : {Hybrid(), Delta()}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      config.dtype = dtype;
      ExpectSame(config, Full(config, Recompute::kUniform, 1), 0.2);
      ExpectSame(config, Full(config, Recompute::kUniform, 2), 0.05);
      ExpectSame(config, Full(config, Recompute::kBlock, 3), 0.05);
    }
  }
}

// A part that one layer alone has takes no less: its memory is shared with nobody.
TEST(RecomputeTest, PartsOfLayersWithOtherMixers) {
  for (const GptConfig& config : {Hybrid(), Delta()}) {
    ExpectSame(config, Selective(config, {.core_attention = true}), 0);
    ExpectSame(config, Selective(config, {.layernorm = true}), 0.01);
    ExpectSame(config, Selective(config, {.core_attention = true, .mlp = true, .layernorm = true, .moe = true}), 0.03);
    ExpectSame(config, Selective(config, {.moe_act = true}), 0);
  }
}

TEST(RecomputeTest, WholeLayersOfOtherForms) {
  GptConfig config = Llama();
  config.post_layernorm = true;
  config.residual_multiplier = 0.5;
  config.bias_dropout_fusion = false;
  config.qk_layernorm = true;
  config.dtype = DType::kBF16;
  ExpectSame(config, Full(config, Recompute::kUniform, 1), 0.2);
  ExpectSame(config, Full(config, Recompute::kUniform, 5), 0);
  config.attention_sinks = true;
  ExpectSame(config, Full(config, Recompute::kBlock, 2), 0.1);
}

TEST(RecomputeTest, PartsOfLayers) {
  const GptConfig base = Base(), experts = Experts(), latent = Latent();
  ExpectSame(base, Selective(base, {.core_attention = true}), 0.1);
  ExpectSame(base, Selective(base, {.mlp = true}), 0.05);
  ExpectSame(base, Selective(base, {.layernorm = true}), 0.02);
  ExpectSame(base, Selective(base, {.core_attention = true, .mlp = true, .layernorm = true}), 0.3);
  ExpectSame(experts, Selective(experts, {.moe_act = true}), 0.005);
  ExpectSame(experts, Selective(experts, {.mlp = true, .moe = true}), 0.05);
  ExpectSame(experts, Selective(experts, {.layernorm = true, .moe = true, .moe_act = true}), 0.05);
  ExpectSame(latent, Selective(latent, {.mla_up_proj = true}), 0.02);
  ExpectSame(latent, Selective(latent, {.core_attention = true, .layernorm = true, .mla_up_proj = true}), 0.1);
}

}  // namespace
}  // namespace mbridge
