// Mixtral: Mistral with experts in every layer.
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/moe_parts.h"

namespace mbridge {
const Architecture& MixtralArchitecture() {
  static const Architecture kMixtral = {
      .model_type = "mixtral",
      .class_name = "MixtralForCausalLM",
      .parts = {.normalization = NormKind::kRmsNorm,
                .activation = ActivationKind::kSwiGlu,
                .position_embedding = PositionKind::kRope,
                .add_bias_linear = false},
      .keys = JoinKeys(
          {DecoderKeys(),
           {ExpertWidthKey(), ExpertCountKey({"num_local_experts"}), IntKey("num_experts_per_tok", &GptConfig::moe_router_topk),
            OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5), RopeKey(),
            SlidingWindowKey(true), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
            OnlyKey("router_jitter_noise", 0.0), RouterFreeKeys()}}),
      .tensors = JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(),
                              ExpertTensors({.block = "block_sparse_moe", .gate = "w1", .up = "w3", .down = "w2"})}),
      .unused = {kRotaryFrequencies}};
  return kMixtral;
}

}  // namespace mbridge
