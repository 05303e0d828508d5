// Falcon-H1: attention and a Mamba-2 mixer side by side in each layer, then an MLP, with a multiplier at every step.
#include <cmath>

#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/mamba_parts.h"

namespace mbridge {
namespace {

// mamba_d_ssm: the mixer's width; null: mamba_expand times the hidden size.
ConfigKey InnerWidthKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    SetLayers(MixerKind::kAttentionAndMamba2, true, to);
    const double absent = 2;
    const auto expanded = static_cast<int64_t>(from->Real("mamba_expand", &absent) * static_cast<double>(to->hidden_size));
    if (from->Int("mamba_d_ssm", &expanded) == to->mamba_num_heads * to->mamba_head_dim) return;
    from->Fault("mamba_d_ssm", "is another number than mamba_n_heads times mamba_d_head");
  };
  const auto write = [](const GptConfig& from, Json* to) { (*to)["mamba_d_ssm"] = from.mamba_num_heads * from.mamba_head_dim; };
  return CustomKey({"mamba_d_ssm", "mamba_expand"}, read, write);
}

// Each by its own switch: add_bias_linear would be the mixer's too.
ConfigKey BiasKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const bool none = false;
    to->add_qkv_bias = to->add_attention_output_bias = from->Flag("attention_bias", &none);
    to->add_mlp_bias = from->Flag("mlp_bias", &none);
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["attention_bias"] = from.add_attention_output_bias;
    (*to)["mlp_bias"] = from.add_mlp_bias;
  };
  return CustomKey({"attention_bias", "mlp_bias"}, read, write);
}

// The order of norm and gate says nothing where there is no norm.
ConfigKey GatedNormKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const bool norm = false, before = true;
    to->mamba_rms_norm = from->Flag("mamba_rms_norm", &norm);
    to->mamba_norm_before_gate = from->Flag("mamba_norm_before_gate", &before) && to->mamba_rms_norm;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["mamba_rms_norm"] = from.mamba_rms_norm;
    if (from.mamba_rms_norm) (*to)["mamba_norm_before_gate"] = from.mamba_norm_before_gate;
  };
  return CustomKey({"mamba_rms_norm", "mamba_norm_before_gate"}, read, write);
}

// The number whose reciprocal is `x`, as near as numbers are.
double Reciprocal(double x) {
  const double guess = 1.0 / x;
  for (const double near : {guess, std::nextafter(guess, 0.0), std::nextafter(guess, INFINITY)}) {
    if (1.0 / near == x) return near;
  }
  return guess;
}

ConfigKey HeadMultiplierKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const double absent = 1;
    const double multiplier = from->Real("lm_head_multiplier", &absent);
    if (multiplier > 0) {
      to->logits_scaling = Reciprocal(multiplier);
    } else {
      from->Unsupported("lm_head_multiplier", "a number above 0");
    }
  };
  const auto write = [](const GptConfig& from, Json* to) { (*to)["lm_head_multiplier"] = Reciprocal(from.logits_scaling); };
  return CustomKey({"lm_head_multiplier"}, read, write);
}

// A list of numbers; absent: each is 1.
std::vector<double> Numbers(ConfigReader* from, const char* name, size_t count) {
  const Json& list = from->Get(name);
  std::vector<double> numbers(count, 1.0);
  bool fits = list.is_null() || (list.is_array() && list.size() == count);
  for (size_t i = 0; fits && i < count && !list.is_null(); ++i) {
    fits = list[i].is_number();
    if (fits) numbers[i] = list[i].get<double>();
  }
  if (!fits) from->Unsupported(name, "a list of " + std::to_string(count) + " numbers");
  return numbers;
}

ConfigKey PartMultipliersKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const std::vector<double> parts = Numbers(from, "ssm_multipliers", 5), mlp = Numbers(from, "mlp_multipliers", 2);
    if (parts != std::vector<double>(5, 1.0)) to->mamba_multipliers = parts;
    to->mlp_gate_multiplier = mlp[0];
    to->mlp_out_multiplier = mlp[1];
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["ssm_multipliers"] = from.mamba_multipliers.empty() ? std::vector<double>(5, 1.0) : from.mamba_multipliers;
    (*to)["mlp_multipliers"] = {from.mlp_gate_multiplier, from.mlp_out_multiplier};
  };
  return CustomKey({"ssm_multipliers", "mlp_multipliers"}, read, write);
}

std::vector<TensorRule> Tensors() {
  const std::string ours = "decoder.layers.{layer}.", theirs = "model.layers.{layer}.", mlp = theirs + "feed_forward.";
  return JoinTensors({MambaTensors(theirs + "mamba."),
                      {{.ours = "decoder.final_layernorm.weight", .theirs = {"model.final_layernorm.weight"}},
                       {.ours = ours + "pre_mlp_layernorm.weight", .theirs = {theirs + "pre_ff_layernorm.weight"}},
                       {.ours = ours + "mlp.linear_fc1.weight", .theirs = {mlp + "gate_proj.weight", mlp + "up_proj.weight"}},
                       {.ours = ours + "mlp.linear_fc1.bias", .theirs = {mlp + "gate_proj.bias", mlp + "up_proj.bias"}},
                       {.ours = ours + "mlp.linear_fc2.weight", .theirs = {mlp + "down_proj.weight"}},
                       {.ours = ours + "mlp.linear_fc2.bias", .theirs = {mlp + "down_proj.bias"}}},
                      EmbeddingAndHeadTensors(),
                      PreNormTensors(),
                      AttentionTensors()});
}

}  // namespace

const Architecture& FalconH1Architecture() {
  static const Architecture kFalconH1 = {
      .model_type = "falcon_h1",
      .class_name = "FalconH1ForCausalLM",
      .parts = {.normalization = NormKind::kRmsNorm,
                .activation = ActivationKind::kSwiGlu,
                .position_embedding = PositionKind::kRope,
                .add_bias_linear = false},
      .keys = JoinKeys({DecoderKeys(),
                        {OnlyKey("hidden_act", "silu"),
                         RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5),
                         RopeKey({.base = 1e5}),
                         FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
                         BiasKey(),
                         OnlyKey("mamba_proj_bias", false),
                         OnlyKey("projectors_bias", false),
                         OnlyKey("mamba_use_mlp", true),
                         IntKey("mamba_n_heads", &GptConfig::mamba_num_heads, [](const GptConfig&) { return 128; }),
                         IntKey("mamba_d_head", &GptConfig::mamba_head_dim),
                         IntKey("mamba_n_groups", &GptConfig::mamba_num_groups, [](const GptConfig&) { return 1; }),
                         IntKey("mamba_d_state", &GptConfig::mamba_state_dim, [](const GptConfig&) { return 256; }),
                         IntKey("mamba_d_conv", &GptConfig::mamba_conv_kernel, [](const GptConfig&) { return 4; }),
                         FlagKey("mamba_conv_bias", &GptConfig::mamba_conv_bias, true),
                         InnerWidthKey(),
                         GatedNormKey(),
                         HeadMultiplierKey(),
                         PartMultipliersKey(),
                         RealKey("embedding_multiplier", &GptConfig::embedding_multiplier, 1.0),
                         RealKey("attention_in_multiplier", &GptConfig::attention_in_multiplier, 1.0),
                         RealKey("attention_out_multiplier", &GptConfig::attention_out_multiplier, 1.0),
                         RealKey("key_multiplier", &GptConfig::key_multiplier, 1.0),
                         RealKey("ssm_in_multiplier", &GptConfig::mamba_in_multiplier, 1.0),
                         RealKey("ssm_out_multiplier", &GptConfig::mamba_out_multiplier, 1.0),
                         TimeStepLimitKey(),
                         MambaFreeKeys(),
                         FreeKeys({"mlp_expansion_factor"})}}),
      .tensors = Tensors(),
      .unused = {kRotaryFrequencies, "model.layers.{layer}.mamba.mup_vector"}};
  return kFalconH1;
}

}  // namespace mbridge
