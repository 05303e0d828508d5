// Phi-3 and Phi-4: Llama with fused query-key-value and gate-up layers.
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {

const Architecture& Phi3Architecture() {
  static const Architecture kPhi3 = {
      .model_type = "phi3",
      .class_name = "Phi3ForCausalLM",
      .parts = {.normalization = NormKind::kRmsNorm,
                .activation = ActivationKind::kSwiGlu,
                .position_embedding = PositionKind::kRope,
                .add_bias_linear = false},
      .keys =
          JoinKeys({DecoderKeys(),
                    {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5), RopeKey(),
                     SlidingWindowKey(true), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
                     OnlyKey("attention_bias", false), OnlyKey("mlp_bias", false), OnlyKey("lm_head_bias", false),
                     OnlyKey("full_attn_mod", 1), OnlyKey("interpolate_factor", 1), FreeKeys({"resid_pdrop", "embd_pdrop"})}}),
      .tensors = JoinTensors(
          {{{.ours = "decoder.layers.{layer}.self_attention.linear_qkv.weight",
             .theirs = {"model.layers.{layer}.self_attn.qkv_proj.weight"},
             .order = QkvRows},
            {.ours = "decoder.layers.{layer}.mlp.linear_fc1.weight", .theirs = {"model.layers.{layer}.mlp.gate_up_proj.weight"}}},
           EmbeddingAndHeadTensors(),
           PreNormTensors(),
           AttentionTensors(),
           GatedMlpTensors()}),
      .unused = {kRotaryFrequencies}};
  return kPhi3;
}

}  // namespace mbridge
