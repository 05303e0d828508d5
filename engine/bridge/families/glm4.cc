// GLM-4 (0414): norms before and after attention and MLP, half of a head turned in pairs of neighbours, fused gate-up layer.
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {

const Architecture& Glm4Architecture() {
  static const Architecture kGlm4 = {
      .model_type = "glm4",
      .class_name = "Glm4ForCausalLM",
      .parts = {.normalization = NormKind::kRmsNorm,
                .activation = ActivationKind::kSwiGlu,
                .position_embedding = PositionKind::kRope,
                .add_bias_linear = false,
                .post_layernorm = true,
                .rotary_interleaved = true},
      .keys = JoinKeys({DecoderKeys(128),
                        {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1.5625e-7),
                         RopeKey({.percent = 0.5}), FlagKey("attention_bias", &GptConfig::add_qkv_bias, true),
                         FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false)}}),
      .tensors = JoinTensors(
          {{{.ours = "decoder.layers.{layer}.mlp.linear_fc1.weight", .theirs = {"model.layers.{layer}.mlp.gate_up_proj.weight"}}},
           PostNormTensors("post_self_attn_layernorm", "post_mlp_layernorm"),
           EmbeddingAndHeadTensors(),
           PreNormTensors(),
           AttentionTensors(),
           GatedMlpTensors()}),
      .unused = {kRotaryFrequencies}};
  return kGlm4;
}

}  // namespace mbridge
