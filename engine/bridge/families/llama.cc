// Llama 1 to 3.3, and Mistral, which is Llama with a sliding window.
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {
namespace {

constexpr GptConfig kParts = {.normalization = NormKind::kRmsNorm,
                              .activation = ActivationKind::kSwiGlu,
                              .position_embedding = PositionKind::kRope,
                              .add_bias_linear = false};

std::vector<TensorRule> Tensors() {
  return JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), GatedMlpTensors()});
}

std::vector<ConfigKey> Keys() {
  return JoinKeys({DecoderKeys(),
                   {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(),
                    FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false)}});
}

}  // namespace

const Architecture& LlamaArchitecture() {
  static const Architecture kLlama = {.model_type = "llama",
                                      .class_name = "LlamaForCausalLM",
                                      .parts = kParts,
                                      .keys = JoinKeys({Keys(), {LinearBiasKey()}}),
                                      .tensors = Tensors(),
                                      .unused = {kRotaryFrequencies}};
  return kLlama;
}

const Architecture& MistralArchitecture() {
  static const Architecture kMistral = {.model_type = "mistral",
                                        .class_name = "MistralForCausalLM",
                                        .parts = kParts,
                                        .keys = JoinKeys({Keys(), {SlidingWindowKey(true)}}),
                                        .tensors = Tensors(),
                                        .unused = {kRotaryFrequencies}};
  return kMistral;
}

}  // namespace mbridge
