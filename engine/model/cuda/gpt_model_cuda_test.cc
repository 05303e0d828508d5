// The model on a GPU: initial weights to the bit of Megatron-LM's, and losses and gradients beside the CPU's.

#include <gmock/gmock.h>

#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"
#include "engine/model/reference_test_support.h"
#include "engine/ops/cuda/test_device.h"

namespace mbridge {
namespace {

constexpr size_t kWorkspace = size_t{128} << 20;

using test::ReadReference;
using test::ReferenceConfig;

std::vector<char> ToHost(const Tensor& tensor) {
  std::vector<char> bytes(tensor.bytes());
  Device& device = DeviceOf(tensor.device);
  device.CopyToHost({.device = tensor.device}, bytes.data(), tensor.data, bytes.size());
  device.Synchronize({.device = tensor.device});
  return bytes;
}

void ExpectMegatronsWeights(const GptConfig& config, const std::string& oracle_file) {
  const nlohmann::json oracle = ReadReference(oracle_file);
  const Context context = DeviceOf(DeviceType::kCuda).MakeContext(kWorkspace);
  GptModel model(config, nullptr, context);
  ParameterStore store(config.dtype, DeviceType::kCuda);
  model.DeclareParameters(&store);
  store.Allocate();
  RngStreams streams(1234);
  model.InitializeWeights(&store, &streams);
  DeviceOf(DeviceType::kCuda).Synchronize(context);
  ASSERT_EQ(store.parameters().size(), oracle.size());
  for (const Parameter& parameter : store.parameters()) {
    const std::string& name = parameter.spec.name;
    ASSERT_TRUE(oracle.contains(name)) << name;
    const std::vector<char> bytes = ToHost(parameter.value);
    EXPECT_EQ(test::Sha256(bytes.data(), bytes.size()), oracle[name]["sha256"].get<std::string>()) << name;
  }
}

TEST(CudaInitialWeights, Seed1EqualsMegatronLmToTheBit) {
  MB_NEEDS_GPU();
  ExpectMegatronsWeights(ReferenceConfig(2, 512, 32000), "seed1_init.json");
}

TEST(CudaInitialWeights, Seed2EqualsMegatronLmToTheBit) {
  MB_NEEDS_GPU();
  ExpectMegatronsWeights(ReferenceConfig(4, 1024, 1024), "seed2_dp2_init.json");
}

struct Outcome {
  double loss = 0;
  std::vector<std::string> names;
  std::vector<std::vector<float>> gradients;
};

// Two training microbatches and an evaluation from the same weights.
Outcome RunOnce(const GptConfig& config, DeviceType type, int64_t b) {
  const Context context = DeviceOf(type).MakeContext(kWorkspace);
  GptModel model(config, nullptr, context);
  ParameterStore store(config.dtype, type);
  model.DeclareParameters(&store);
  store.Allocate();
  RngStreams streams(7);
  model.InitializeWeights(&store, &streams);
  if (type == DeviceType::kCuda) {  // A weight in 10^6 differs by a step: take the CPU's.
    GptModel twin(config, nullptr);
    ParameterStore from(config.dtype, DeviceType::kCpu);
    twin.DeclareParameters(&from);
    from.Allocate();
    RngStreams again(7);
    twin.InitializeWeights(&from, &again);
    DeviceOf(type).CopyToDevice(context, store.values().data, from.values().data, from.values().bytes());
    DeviceOf(type).Synchronize(context);
  }
  model.Prepare(store, static_cast<int>(b));
  const int64_t s = config.seq_length;
  std::vector<int32_t> tokens(b * s), labels(b * s), positions(b * s);
  std::vector<float> mask(b * s, 1.0f);
  std::mt19937 engine(3);
  for (int64_t i = 0; i < b * s; ++i) {
    tokens[i] = static_cast<int32_t>(engine() % static_cast<uint32_t>(config.padded_vocab_size));
    labels[i] = static_cast<int32_t>(engine() % static_cast<uint32_t>(config.padded_vocab_size));
    positions[i] = static_cast<int32_t>(i % s);
    if (i % 11 == 0) mask[i] = 0.0f;
  }
  Outcome outcome;
  for (int i = 0; i < 2; ++i) {
    const auto sum = model.ForwardBackward(tokens.data(), labels.data(), mask.data(), positions.data(), 0.5f, &streams);
    outcome.loss += sum.loss_sum / sum.tokens;
  }
  const auto sum = model.Evaluate(tokens.data(), labels.data(), mask.data(), positions.data());
  outcome.loss += sum.loss_sum / sum.tokens;
  for (const Parameter& parameter : store.parameters()) {
    if (parameter.main_grad.data == nullptr) continue;  // Expert biases are not trained by gradients.
    const std::vector<char> bytes = ToHost(parameter.main_grad);
    outcome.names.push_back(parameter.spec.name);
    outcome.gradients.emplace_back(parameter.main_grad.size());
    std::memcpy(outcome.gradients.back().data(), bytes.data(), bytes.size());
  }
  return outcome;
}

// Gradients by the norm of the difference over the norm.
void ExpectAgrees(const GptConfig& config, int64_t b, double loss_tolerance, double gradient_tolerance) {
  const Outcome cpu = RunOnce(config, DeviceType::kCpu, b), gpu = RunOnce(config, DeviceType::kCuda, b);
  EXPECT_NEAR(gpu.loss, cpu.loss, loss_tolerance);
  for (size_t p = 0; p < cpu.names.size(); ++p) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < cpu.gradients[p].size(); ++i) {
      const double d = gpu.gradients[p][i] - cpu.gradients[p][i];
      difference += d * d;
      norm += static_cast<double>(cpu.gradients[p][i]) * cpu.gradients[p][i];
    }
    EXPECT_LE(std::sqrt(difference), gradient_tolerance * std::sqrt(norm)) << cpu.names[p];
  }
}

GptConfig TinyGpt() {
  GptConfig config = ReferenceConfig(2, 64, 1000);
  config.hidden_size = 128;
  config.num_attention_heads = config.num_query_groups = 2;
  config.ffn_hidden_size = 512;
  config.hidden_dropout = config.attention_dropout = 0;
  return config;
}

GptConfig TinyLlama() {
  GptConfig config = TinyGpt();
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 64;
  config.ffn_hidden_size = 352;
  config.normalization = NormKind::kRmsNorm;
  config.activation = ActivationKind::kSwiGlu;
  config.position_embedding = PositionKind::kRope;
  config.add_bias_linear = config.tied_embeddings = false;
  return config;
}

// Mixtral, Qwen2-MoE and Qwen3-MoE: the scores are of the chosen; a shared expert with a gate.
GptConfig TinyMoe() {
  GptConfig config = TinyLlama();
  config.num_moe_experts = 8;
  config.moe_ffn_hidden_size = 96;
  config.moe_router_topk = 2;
  config.moe_aux_loss_coeff = 1e-2;
  config.moe_z_loss_coeff = 1e-3;
  config.moe_shared_expert_intermediate_size = 160;
  config.moe_shared_expert_gate = true;
  return config;
}

// DeepSeek-V2-Lite: latent attention with interleaved pairs and YaRN, a first dense layer, shared experts.
GptConfig TinyDeepSeek() {
  GptConfig config = TinyMoe();
  config.num_query_groups = config.num_attention_heads = 4;
  config.multi_latent_attention = true;
  config.kv_lora_rank = 48;
  config.qk_head_dim = 32;
  config.qk_pos_emb_head_dim = 16;
  config.kv_channels = 48;
  config.v_head_dim = 40;
  config.rotary_interleaved = true;
  config.yarn_rotary_scaling_factor = 4;
  config.rope_original_length = 16;
  config.mscale_all_dim = 0.707;
  config.moe_layer_freq = {0, 1};
  config.moe_router_score = RouterScore::kSoftmax;
  config.moe_shared_expert_gate = false;
  return config;
}

// GPT-OSS: sinks, windows in every other layer, biases, clamped quick GELU with an offset.
GptConfig TinyGptOss() {
  GptConfig config = TinyMoe();
  config.add_bias_linear = true;
  config.attention_sinks = true;
  config.attention_window = 13;
  config.window_attn_skip_freq = {1, 0};
  config.activation = ActivationKind::kQuickGeglu;
  config.activation_clamp = 7;
  config.glu_linear_offset = 1;
  config.moe_shared_expert_intermediate_size = 0;
  config.moe_shared_expert_gate = false;
  return config;
}

// Gemma 2 and 3: sandwich norms, soft caps, GeGLU, local layers with a rotary base of their own, scaled tied embeddings.
GptConfig TinyGemma() {
  GptConfig config = TinyLlama();
  config.activation = ActivationKind::kGegluTanh;
  config.tied_embeddings = config.post_layernorm = config.layernorm_zero_centered_gamma = config.qk_layernorm = true;
  config.attention_window = 17;
  config.window_attn_skip_freq = {1, 0};
  config.rotary_base_local = 1000;
  config.attn_logit_softcapping = 5;
  config.final_logit_softcapping = 3;
  config.embedding_multiplier = 11.3;
  return config;
}

TEST(CudaModelSmall, GptInFp32) {
  MB_NEEDS_GPU();
  GptConfig config = TinyGpt();
  config.dtype = DType::kF32;
  ExpectAgrees(config, 3, 1e-5, 2e-5);
}

TEST(CudaModelSmall, GptInFp32WithDropout) {
  MB_NEEDS_GPU();
  GptConfig config = TinyGpt();
  config.dtype = DType::kF32;
  config.hidden_dropout = config.attention_dropout = 0.1;
  ExpectAgrees(config, 3, 1e-5, 2e-5);
  config.bias_dropout_fusion = config.bias_activation_fusion = false;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
}

TEST(CudaModelSmall, LlamaInFp32) {
  MB_NEEDS_GPU();
  GptConfig config = TinyLlama();
  config.dtype = DType::kF32;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
  config.qk_layernorm = true;
  config.attention_window = 17;
  ExpectAgrees(config, 1, 1e-5, 2e-5);
}

TEST(CudaModelSmall, GptInBF16) {
  MB_NEEDS_GPU();
  ExpectAgrees(TinyGpt(), 3, 1e-3, 2e-2);
}

TEST(CudaModelSmall, LlamaInBF16) {
  MB_NEEDS_GPU();
  ExpectAgrees(TinyLlama(), 2, 1e-3, 2e-2);
}

TEST(CudaModelSmall, ExpertsInFp32) {
  MB_NEEDS_GPU();
  GptConfig config = TinyMoe();
  config.dtype = DType::kF32;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
  config.bias_activation_fusion = false;
  config.moe_load_balancing = LoadBalancing::kSequence;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
}

// DeepSeek-V3: a sigmoid router with groups and a bias, queries from a latent vector too.
TEST(CudaModelSmall, DeepSeekInFp32) {
  MB_NEEDS_GPU();
  GptConfig config = TinyDeepSeek();
  config.dtype = DType::kF32;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
  config.q_lora_rank = 56;
  config.moe_router_score = RouterScore::kSigmoid;
  config.moe_router_enable_expert_bias = true;
  config.moe_router_num_groups = 4;
  config.moe_router_group_topk = 2;
  config.moe_router_group_experts = 2;
  config.moe_router_topk = 3;
  config.moe_router_topk_scaling_factor = 2.5;
  config.moe_load_balancing = LoadBalancing::kSequence;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
}

TEST(CudaModelSmall, GptOssInFp32) {
  MB_NEEDS_GPU();
  GptConfig config = TinyGptOss();
  config.dtype = DType::kF32;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
}

TEST(CudaModelSmall, GemmaInFp32) {
  MB_NEEDS_GPU();
  GptConfig config = TinyGemma();
  config.dtype = DType::kF32;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
  config.qk_norm_over_projection = true;  // OLMo-2's place and scope of the norms, a scale of the logits.
  config.pre_layernorm = config.layernorm_zero_centered_gamma = false;
  config.attn_logit_softcapping = config.final_logit_softcapping = 0;
  config.logits_scaling = 3;
  config.residual_multiplier = 0.3;
  ExpectAgrees(config, 2, 1e-5, 2e-5);
}

// A token whose second and third score are a rounding apart may change its expert, and that expert's gradient by as much as a
// token counts: here every expert is chosen, and what differs is the arithmetic alone.
TEST(CudaModelSmall, FamiliesInBF16) {
  MB_NEEDS_GPU();
  for (GptConfig config : {TinyMoe(), TinyDeepSeek(), TinyGptOss(), TinyGemma()}) {
    if (config.num_moe_experts > 0) config.num_moe_experts = config.moe_router_topk = 3;
    if (config.multi_latent_attention) {  // DeepSeek's own sizes, which flash attention takes.
      config.qk_head_dim = config.v_head_dim = 128;
      config.qk_pos_emb_head_dim = 64;
      config.kv_channels = 192;
    }
    SCOPED_TRACE(fmt::format("latent {}, sinks {}, experts {}", config.multi_latent_attention, config.attention_sinks,
                             config.num_moe_experts));
    ExpectAgrees(config, 2, 1e-3, 2e-2);
  }
}

TEST(CudaModelSmall, RefusesMoreExpertsThanTheRouterTakes) {
  GptConfig config = TinyMoe();
  config.num_moe_experts = 513;
  try {
    RequireCudaParts(config);
    FAIL() << "513 experts";
  } catch (const EngineError& error) {
    EXPECT_NE(std::string(error.what()).find("num_moe_experts is 513: the CUDA router takes up to 512"), std::string::npos)
        << error.what();
  }
}

// Losses and gradients of eight microbatches, four calls of two; the streams' positions afterwards.
struct GraphOutcome {
  std::vector<double> losses;
  std::vector<int64_t> nodes;  // Of the graph that there is after each call.
  std::vector<char> gradients;
  RngStreams::State streams;
};

GraphOutcome RunWithGraphs(const GptConfig& config, GptModel::Graphs graphs) {
  const Context context = DeviceOf(DeviceType::kCuda).MakeContext(kWorkspace);
  constexpr int kRows = 2;
  GptModel model(config, nullptr, context);
  ParameterStore store(config.dtype, DeviceType::kCuda);
  model.DeclareParameters(&store);
  store.Allocate();
  RngStreams streams(7);
  model.InitializeWeights(&store, &streams);
  model.Prepare(store, kRows);
  model.UseGraphs(graphs, 2, 1);
  const int64_t count = kRows * config.seq_length;
  std::mt19937 engine(3);
  GraphOutcome outcome;
  for (int call = 0; call < 4; ++call) {
    std::vector<int32_t> tokens[2], labels[2], positions(count);
    const std::vector<float> mask(count, 1.0f);
    std::vector<HostMicrobatch> batches;
    for (int64_t t = 0; t < count; ++t) positions[t] = static_cast<int32_t>(t % config.seq_length);
    for (int i = 0; i < 2; ++i) {
      for (int64_t t = 0; t < count; ++t) {
        tokens[i].push_back(static_cast<int32_t>(engine() % static_cast<uint32_t>(config.padded_vocab_size)));
        labels[i].push_back(static_cast<int32_t>(engine() % static_cast<uint32_t>(config.padded_vocab_size)));
      }
      batches.push_back({tokens[i].data(), labels[i].data(), mask.data(), positions.data()});
    }
    model.AddForwardBackwards(batches, call == 3 ? 0.25f : 0.5f, &streams);  // Another scale: another graph.
    outcome.losses.push_back(model.TakeLossSum().loss_sum);
    outcome.nodes.push_back(model.RecordedNodes());
  }
  outcome.gradients = ToHost(store.main_grads());
  outcome.streams = streams.Save();
  return outcome;
}

TEST(CudaGraphs, ChangeNoBit) {
  MB_NEEDS_GPU();
  for (const double dropout : {0.0, 0.1}) {
    for (const bool fused : {true, false}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kUniform}) {
        GptConfig config = ReferenceConfig(2, 64, 512);
        config.hidden_dropout = config.attention_dropout = dropout;
        config.bias_dropout_fusion = fused;
        config.recompute = recompute;
        config.deterministic = true;
        const GraphOutcome plain = RunWithGraphs(config, GptModel::Graphs::kNone);
        EXPECT_THAT(plain.nodes, testing::Each(0));
        int64_t of_a_microbatch = 0;
        for (const GptModel::Graphs graphs : {GptModel::Graphs::kMicrobatch, GptModel::Graphs::kCall}) {
          const GraphOutcome replayed = RunWithGraphs(config, graphs);
          EXPECT_EQ(replayed.losses, plain.losses) << dropout << fused;
          EXPECT_TRUE(replayed.gradients == plain.gradients) << dropout << fused;
          EXPECT_EQ(replayed.streams, plain.streams);
          // The first call warms up. A graph of a call holds two microbatches.
          constexpr int64_t kLeast = 20;
          EXPECT_THAT(replayed.nodes, testing::ElementsAre(0, testing::Gt(kLeast), testing::Gt(kLeast), testing::Gt(kLeast)));
          EXPECT_GT(replayed.nodes[1], of_a_microbatch);
          of_a_microbatch = replayed.nodes[1];
        }
      }
    }
  }
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return std::sqrt(sum);
}

// Where sums differ by a rounding of BF16, codes differ by a step, so that the two devices' gradients lie as far apart as two
// independent roundings. What can be asked: the GPU is as near to the 32-bit gradient as the CPU twin.
TEST(CudaModelSmall, NarrowLinearLayers) {
  MB_NEEDS_GPU();
  for (const ScalingRecipe recipe : {ScalingRecipe::kCurrent, ScalingRecipe::kDelayed, ScalingRecipe::kBlockwise,
                                     ScalingRecipe::kMxfp8, ScalingRecipe::kNvfp4}) {
    for (const bool blocks : {false, true}) {
      SCOPED_TRACE(fmt::format("recipe {}, blocks {}", static_cast<int>(recipe), blocks));
      GptConfig config = TinyLlama();
      if (blocks) config.ffn_hidden_size = 384;  // With two sequences of 64 tokens all sides are multiples of 128.
      const int64_t b = blocks ? 2 : 3;
      GptConfig wide = config;
      wide.dtype = DType::kF32;
      config.low_precision = {.recipe = recipe, .history_length = 4};
      const Outcome exact = RunOnce(wide, DeviceType::kCpu, b), cpu = RunOnce(config, DeviceType::kCpu, b),
                    gpu = RunOnce(config, DeviceType::kCuda, b);
      EXPECT_NEAR(gpu.loss, cpu.loss, 0.02);
      for (size_t p = 0; p < cpu.names.size(); ++p) {
        EXPECT_LE(Distance(gpu.gradients[p], exact.gradients[p]), 1.25 * Distance(cpu.gradients[p], exact.gradients[p]))
            << cpu.names[p];
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
