// Families whose only norms of a layer stand after attention and MLP: OLMo 2 (norms of all queries and all keys of a token) and
// EXAONE 4 (norms of each head; in hybrid models the layers without a window have no rotation).
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {
namespace {

GptConfig Parts() {
  return {.normalization = NormKind::kRmsNorm,
          .activation = ActivationKind::kSwiGlu,
          .position_embedding = PositionKind::kRope,
          .add_bias_linear = false,
          .qk_layernorm = true,
          .pre_layernorm = false,
          .post_layernorm = true};
}

std::vector<TensorRule> Tensors() {
  return JoinTensors({PostNormTensors("post_attention_layernorm", "post_feedforward_layernorm"), EmbeddingAndHeadTensors(),
                      AttentionTensors(), GatedMlpTensors()});
}

std::vector<ConfigKey> Keys() {
  return JoinKeys({DecoderKeys(),
                   {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-5), RopeKey(),
                    FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false)}});
}

GptConfig Olmo2Parts() {
  GptConfig parts = Parts();
  parts.qk_norm_over_projection = true;
  return parts;
}

}  // namespace

const Architecture& Olmo2Architecture() {
  static const Architecture kOlmo2 = {.model_type = "olmo2",
                                      .class_name = "Olmo2ForCausalLM",
                                      .parts = Olmo2Parts(),
                                      .keys = JoinKeys({Keys(), {AttentionBiasKey()}}),
                                      .tensors = Tensors(),
                                      .unused = {kRotaryFrequencies}};
  return kOlmo2;
}

const Architecture& Exaone4Architecture() {
  static const Architecture kExaone4 = {.model_type = "exaone4",
                                        .class_name = "Exaone4ForCausalLM",
                                        .parts = Parts(),
                                        .keys = JoinKeys({Keys(), {LayerTypesKey(0, 4, true), OnlyKey("attention_bias", false)}}),
                                        .tensors = Tensors(),
                                        .unused = {kRotaryFrequencies}};
  return kExaone4;
}

}  // namespace mbridge
