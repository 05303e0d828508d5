// Qwen 2 and 2.5 (biases of the query-key-value layer), Qwen 3 (norms of queries and keys).
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {
namespace {

GptConfig Parts(bool qkv_bias, bool qk_norm) {
  return {.normalization = NormKind::kRmsNorm,
          .activation = ActivationKind::kSwiGlu,
          .position_embedding = PositionKind::kRope,
          .add_bias_linear = false,
          .add_qkv_bias = qkv_bias,
          .qk_layernorm = qk_norm};
}

std::vector<TensorRule> Tensors() {
  return JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), GatedMlpTensors()});
}

std::vector<ConfigKey> Keys() {
  return JoinKeys({DecoderKeys(),
                   {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(),
                    SlidingWindowKey(false), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false)}});
}

}  // namespace

const Architecture& Qwen2Architecture() {
  static const Architecture kQwen2 = {.model_type = "qwen2",
                                      .class_name = "Qwen2ForCausalLM",
                                      .parts = Parts(true, false),
                                      .keys = JoinKeys({Keys(), {OnlyKey("use_mrope", false)}}),
                                      .tensors = Tensors(),
                                      .unused = {kRotaryFrequencies}};
  return kQwen2;
}

const Architecture& Qwen3Architecture() {
  static const Architecture kQwen3 = {.model_type = "qwen3",
                                      .class_name = "Qwen3ForCausalLM",
                                      .parts = Parts(false, true),
                                      .keys = JoinKeys({Keys(), {AttentionBiasKey()}}),
                                      .tensors = Tensors(),
                                      .unused = {kRotaryFrequencies}};
  return kQwen3;
}

}  // namespace mbridge
