// MiniMax-M2: norms over whole query and key projections, partly turned heads, a sigmoid router with correction bias.
#include <cmath>

#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/moe_parts.h"

namespace mbridge {
namespace {

GptConfig Parts() {
  GptConfig parts;
  parts.normalization = NormKind::kRmsNorm;
  parts.activation = ActivationKind::kSwiGlu;
  parts.position_embedding = PositionKind::kRope;
  parts.add_bias_linear = false;
  parts.qk_layernorm = parts.qk_norm_over_projection = true;
  parts.moe_router_score = RouterScore::kSigmoid;
  parts.moe_router_enable_expert_bias = true;
  parts.moe_router_fp32 = true;
  return parts;
}

// Elements of a head that are turned, in files for the original code, which has use_qk_norm. transformers has its own word for it
// (rope_parameters/partial_rotary_factor) and leaves this one unread.
ConfigKey RotaryDimKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    if (!from->Has("rotary_dim") || !from->Has("use_qk_norm") || to->kv_channels <= 0 || to->rotary_percent != 1.0) return;
    to->rotary_percent = static_cast<double>(from->Int("rotary_dim")) / static_cast<double>(to->kv_channels);
  };
  const auto write = [](const GptConfig& from, Json* to) {
    if (!to->contains("rotary_dim")) return;
    (*to)["rotary_dim"] = std::llround(from.rotary_percent * static_cast<double>(from.kv_channels));
  };
  return CustomKey({"rotary_dim"}, read, write);
}

}  // namespace

const Architecture& MiniMaxM2Architecture() {
  static const Architecture kMiniMax = {
      .model_type = "minimax_m2",
      .class_name = "MiniMaxM2ForCausalLM",
      .parts = Parts(),
      .keys = JoinKeys(
          {DecoderKeys(),
           {ExpertWidthKey(), ExpertCountKey({"num_local_experts"}), ExpertsPerTokenKey({"num_experts_per_tok"}),
            OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(),
            RotaryDimKey(), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
            OnlyKey("router_jitter_noise", 0.0), OnlyKey("scoring_func", "sigmoid"), OnlyKey("use_qk_norm", true),
            OnlyKey("qk_norm_type", "per_layer"), OnlyKey("use_routing_bias", true), OnlyKey("shared_intermediate_size", 0),
            OnlyKey("sliding_window", Json()),
            FreeKeys({"attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta",
                      "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"}),
            RouterFreeKeys()}}),
      .tensors = JoinTensors(
          {EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(),
           ExpertTensors(
               {.block = "block_sparse_moe", .gate = "w1", .up = "w3", .down = "w2", .expert_bias = "e_score_correction_bias"})}),
      .unused = {kRotaryFrequencies}};
  return kMiniMax;
}

}  // namespace mbridge
