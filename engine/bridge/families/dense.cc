// Small variations of Llama: Granite (multipliers), ERNIE 4.5 (pairs of neighbours are turned), Nemotron (zero-centred LayerNorm,
// squared ReLU, half of a head turned), StarCoder 2 (LayerNorm, GELU, biases).
#include <fmt/format.h>

#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {
namespace {

constexpr GptConfig kLlama = {.normalization = NormKind::kRmsNorm,
                              .activation = ActivationKind::kSwiGlu,
                              .position_embedding = PositionKind::kRope,
                              .add_bias_linear = false};

std::vector<TensorRule> LlamaTensors() {
  return JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), GatedMlpTensors()});
}

// Another word for the size of a head, which transformers leaves unread.
ConfigKey HeadSizeKey(const char* name) {
  const auto read = [name](ConfigReader* from, GptConfig* to) {
    if (from->Int(name, &to->kv_channels) != to->kv_channels) from->Unsupported(name, fmt::format("{}", to->kv_channels));
  };
  const auto write = [name](const GptConfig& from, Json* to) {
    if (to->contains(name)) (*to)[name] = from.kv_channels;
  };
  return CustomKey({name}, read, write);
}

// An MLP of two layers without gate.
std::vector<TensorRule> PlainMlpTensors(const std::string& fc1, const std::string& fc2) {
  std::vector<TensorRule> rules;
  for (const std::string kind : {".weight", ".bias"}) {
    rules.push_back(
        {.ours = "decoder.layers.{layer}.mlp.linear_fc1" + kind, .theirs = {"model.layers.{layer}.mlp." + fc1 + kind}});
    rules.push_back(
        {.ours = "decoder.layers.{layer}.mlp.linear_fc2" + kind, .theirs = {"model.layers.{layer}.mlp." + fc2 + kind}});
  }
  return JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), rules});
}

}  // namespace

const Architecture& GraniteArchitecture() {
  static const Architecture kGranite = {
      .model_type = "granite",
      .class_name = "GraniteForCausalLM",
      .parts = kLlama,
      .keys = JoinKeys({DecoderKeys(),
                        {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(),
                         LinearBiasKey(), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
                         RealKey("embedding_multiplier", &GptConfig::embedding_multiplier, 1.0),
                         RealKey("attention_multiplier", &GptConfig::softmax_scale, 1.0),
                         RealKey("residual_multiplier", &GptConfig::residual_multiplier, 1.0),
                         RealKey("logits_scaling", &GptConfig::logits_scaling, 1.0)}}),
      .tensors = LlamaTensors(),
      .unused = {kRotaryFrequencies}};
  return kGranite;
}

const Architecture& Ernie45Architecture() {
  static GptConfig parts = kLlama;
  parts.rotary_interleaved = true;
  static const Architecture kErnie = {
      .model_type = "ernie4_5",
      .class_name = "Ernie4_5ForCausalLM",
      .parts = parts,
      .keys = JoinKeys({DecoderKeys(128),
                        {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5),
                         RopeKey({.base = 500000}), FlagKey("use_bias", &GptConfig::add_bias_linear, false),
                         FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, true)}}),
      .tensors = LlamaTensors(),
      .unused = {kRotaryFrequencies}};
  return kErnie;
}

const Architecture& NemotronArchitecture() {
  static const Architecture kNemotron = {
      .model_type = "nemotron",
      .class_name = "NemotronForCausalLM",
      .parts = {.normalization = NormKind::kLayerNorm,
                .activation = ActivationKind::kSquaredRelu,
                .position_embedding = PositionKind::kRope,
                .add_bias_linear = false,
                .layernorm_zero_centered_gamma = true},
      .keys = JoinKeys(
          {DecoderKeys(),
           {OnlyKey("hidden_act", "relu2"), RealKey("norm_eps", &GptConfig::layernorm_epsilon, 1e-5), RopeKey({.percent = 0.5}),
            LinearBiasKey(), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false), HeadSizeKey("kv_channels")}}),
      .tensors = PlainMlpTensors("up_proj", "down_proj"),
      .unused = {kRotaryFrequencies}};
  return kNemotron;
}

const Architecture& Starcoder2Architecture() {
  static const Architecture kStarcoder2 = {
      .model_type = "starcoder2",
      .class_name = "Starcoder2ForCausalLM",
      .parts = {.normalization = NormKind::kLayerNorm,
                .activation = ActivationKind::kGeluTanh,
                .position_embedding = PositionKind::kRope,
                .add_bias_linear = true},
      .keys = JoinKeys(
          {DecoderKeys(),
           {ActivationKey("hidden_act", {{"gelu_pytorch_tanh", ActivationKind::kGeluTanh}, {"gelu", ActivationKind::kGelu}}),
            RealKey("norm_epsilon", &GptConfig::layernorm_epsilon, 1e-5), RopeKey(), SlidingWindowKey(true),
            FlagKey("use_bias", &GptConfig::add_bias_linear, true),
            FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, true), OneOfKey("mlp_type", {"default"}),
            OneOfKey("norm_type", {"layer_norm"}),
            FreeKeys({"residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon",
                      "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"})}}),
      .tensors = PlainMlpTensors("c_fc", "c_proj"),
      .unused = {kRotaryFrequencies}};
  return kStarcoder2;
}

}  // namespace mbridge
