// Gemma 1 to 3 (text): weights of norms stored minus one, embeddings scaled by the root of the hidden size, GeGLU. Gemma 2 adds
// norms after attention and MLP, windows in turns and soft caps; Gemma 3 query-key norms and a rotary base of its own for
// windows.
#include <cmath>

#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {
namespace {

GptConfig Parts(bool post_norm, bool qk_norm) {
  return {.normalization = NormKind::kRmsNorm,
          .activation = ActivationKind::kGegluTanh,
          .position_embedding = PositionKind::kRope,
          .add_bias_linear = false,
          .qk_layernorm = qk_norm,
          .post_layernorm = post_norm,
          .layernorm_zero_centered_gamma = true};
}

// No key of its own: after DecoderKeys.
ConfigKey EmbeddingScale() {
  const auto read = [](ConfigReader*, GptConfig* to) {
    to->embedding_multiplier = to->hidden_size > 0 ? std::sqrt(static_cast<double>(to->hidden_size)) : 1.0;
  };
  return CustomKey({}, read, nullptr);
}

std::vector<ConfigKey> Keys(const char* activation) {
  const std::vector<std::pair<std::string, ActivationKind>> kinds = {{"gelu_pytorch_tanh", ActivationKind::kGegluTanh},
                                                                     {"gelu", ActivationKind::kGeglu}};
  return JoinKeys(
      {DecoderKeys(256),
       {EmbeddingScale(), ActivationKey(activation, kinds), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6),
        FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, true), AttentionBiasKey(),
        OnlyKey("use_bidirectional_attention", false), FreeKeys({"cache_implementation"})}});
}

ConfigKey QueryScalarKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const double absent = 256;
    const double scalar = from->Real("query_pre_attn_scalar", &absent);
    if (scalar > 0) to->softmax_scale = std::pow(scalar, -0.5);
    if (scalar <= 0) from->Unsupported("query_pre_attn_scalar", "a number above 0");
  };
  // The nearest whole number where it gives the same scale.
  const auto write = [](const GptConfig& from, Json* to) {
    const double scalar = 1.0 / (from.softmax_scale * from.softmax_scale);
    const bool whole = std::pow(std::round(scalar), -0.5) == from.softmax_scale;
    (*to)["query_pre_attn_scalar"] = whole ? Json(static_cast<int64_t>(std::llround(scalar))) : Json(scalar);
  };
  return CustomKey({"query_pre_attn_scalar"}, read, write);
}

// Null means no cap.
ConfigKey SoftCapKey(const char* name, double GptConfig::*field) {
  const auto read = [name, field](ConfigReader* from, GptConfig* to) {
    const double none = 0;
    to->*field = from->Real(name, &none);
  };
  const auto write = [name, field](const GptConfig& from, Json* to) {
    (*to)[name] = from.*field > 0 ? Json(from.*field) : Json();
  };
  return CustomKey({name}, read, write);
}

std::vector<ConfigKey> CapKeys() {
  return {QueryScalarKey(), SoftCapKey("attn_logit_softcapping", &GptConfig::attn_logit_softcapping),
          SoftCapKey("final_logit_softcapping", &GptConfig::final_logit_softcapping)};
}

std::vector<TensorRule> SandwichTensors() {
  return JoinTensors({{{.ours = "decoder.layers.{layer}.pre_mlp_layernorm.weight",
                        .theirs = {"model.layers.{layer}.pre_feedforward_layernorm.weight"}}},
                      PostNormTensors("post_attention_layernorm", "post_feedforward_layernorm"),
                      EmbeddingAndHeadTensors(),
                      PreNormTensors(),
                      AttentionTensors(),
                      GatedMlpTensors()});
}

}  // namespace

const Architecture& GemmaArchitecture() {
  static const Architecture kGemma = {
      .model_type = "gemma",
      .class_name = "GemmaForCausalLM",
      .parts = Parts(false, false),
      .keys = JoinKeys({Keys("hidden_act"), {RopeKey(), OneOfKey("hidden_activation", {"gelu_pytorch_tanh"})}}),
      .tensors = JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), GatedMlpTensors()}),
      .unused = {kRotaryFrequencies}};
  return kGemma;
}

const Architecture& Gemma2Architecture() {
  static const Architecture kGemma2 = {
      .model_type = "gemma2",
      .class_name = "Gemma2ForCausalLM",
      .parts = Parts(true, false),
      .keys =
          JoinKeys({Keys("hidden_activation"), CapKeys(), {RopeKey(), LayerTypesKey(4096, 2, false), FreeKeys({"hidden_act"})}}),
      .tensors = SandwichTensors(),
      .unused = {kRotaryFrequencies}};
  return kGemma2;
}

const Architecture& Gemma3Architecture() {
  static const Architecture kGemma3 = {
      .model_type = "gemma3_text",
      .class_name = "Gemma3ForCausalLM",
      .parts = Parts(true, true),
      .keys = JoinKeys({Keys("hidden_activation"), CapKeys(), {LayeredRopeKey(1000000, 10000), LayerTypesKey(4096, 6, false)}}),
      .tensors = SandwichTensors(),
      .unused = {kRotaryFrequencies}};
  return kGemma3;
}

}  // namespace mbridge
