// GPT-OSS: attention sinks, windows in every other layer, biases everywhere, experts with a clamped gated quick GELU.
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/moe_parts.h"

namespace mbridge {
namespace {

GptConfig Parts() {
  GptConfig parts;
  parts.normalization = NormKind::kRmsNorm;
  parts.activation = ActivationKind::kQuickGeglu;
  parts.position_embedding = PositionKind::kRope;
  parts.attention_sinks = true;
  parts.glu_linear_offset = 1.0;
  return parts;
}

// Experts are stacked, with inputs before outputs; gate and linear half in turns.
std::vector<TensorRule> Experts() {
  const std::string ours = "decoder.layers.{layer}.mlp.", theirs = "model.layers.{layer}.mlp.";
  return {{.ours = ours + "router.weight", .theirs = {theirs + "router.weight"}},
          {.ours = ours + "router.bias", .theirs = {theirs + "router.bias"}},
          {.ours = ours + "experts.linear_fc1.weight{expert}",
           .theirs = {theirs + "experts.gate_up_proj"},
           .order = InterleavedGateRows,
           .transposed = true},
          {.ours = ours + "experts.linear_fc1.bias{expert}",
           .theirs = {theirs + "experts.gate_up_proj_bias"},
           .order = InterleavedGateRows},
          {.ours = ours + "experts.linear_fc2.weight{expert}", .theirs = {theirs + "experts.down_proj"}, .transposed = true},
          {.ours = ours + "experts.linear_fc2.bias{expert}", .theirs = {theirs + "experts.down_proj_bias"}},
          {.ours = "decoder.layers.{layer}.self_attention.core_attention.softmax_offset",
           .theirs = {"model.layers.{layer}.self_attn.sinks"}}};
}

}  // namespace

const Architecture& GptOssArchitecture() {
  static const Architecture kGptOss = {
      .model_type = "gpt_oss",
      .class_name = "GptOssForCausalLM",
      .parts = Parts(),
      .keys = JoinKeys({DecoderKeys(),
                        {ExpertWidthKey(), ExpertCountKey({"num_local_experts"}),
                         ExpertsPerTokenKey({"num_experts_per_tok", "experts_per_token"}), OnlyKey("hidden_act", "silu"),
                         RealKey("swiglu_limit", &GptConfig::activation_clamp, 7.0),
                         RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5), RopeKey(), LayerTypesKey(128, 2, false),
                         FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false), OnlyKey("attention_bias", true),
                         FreeKeys({"initial_context_length"}), RouterFreeKeys()}}),
      .tensors = JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), Experts()}),
      .unused = {kRotaryFrequencies}};
  return kGptOss;
}

}  // namespace mbridge
