// GLM-4.5 and later MoE: grouped-query attention with norms, DeepSeek-V3's experts.
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
  parts.moe_router_score = RouterScore::kSigmoid;
  parts.moe_router_enable_expert_bias = true;
  parts.moe_router_fp32 = true;
  return parts;
}

}  // namespace

const Architecture& Glm4MoeArchitecture() {
  static const Architecture kGlm4Moe = {
      .model_type = "glm4_moe",
      .class_name = "Glm4MoeForCausalLM",
      .parts = Parts(),
      .keys = JoinKeys(
          {DecoderKeys(),
           {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5), RopeKey(),
            FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
            FlagKey("attention_bias", &GptConfig::add_qkv_bias, false), FlagKey("use_qk_norm", &GptConfig::qk_layernorm, false),
            SigmoidGroupsKey(), OnlyKey("norm_topk_prob", true), OnlyKey("scoring_func", "sigmoid")},
           DeepSeekExpertKeys()}),
      .tensors = JoinTensors(
          {EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), GatedMlpTensors(), ExpertTensors({.block = "mlp"})}),
      .unused = {kRotaryFrequencies}};
  return kGlm4Moe;
}

}  // namespace mbridge
