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

// The engine has biases in all linear layers or in none.
ConfigKey BiasKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const bool none = false;
    to->add_bias_linear = from->Flag("attention_bias", &none);
    if (from->Flag("mlp_bias", &none) != to->add_bias_linear) from->Unsupported("mlp_bias", "the value of attention_bias");
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["attention_bias"] = from.add_bias_linear;
    (*to)["mlp_bias"] = from.add_bias_linear;
  };
  return CustomKey({"attention_bias", "mlp_bias"}, read, write);
}

}  // namespace

const Architecture& LlamaArchitecture() {
  static const Architecture kLlama = {.model_type = "llama",
                                      .class_name = "LlamaForCausalLM",
                                      .parts = kParts,
                                      .keys = JoinKeys({Keys(), {BiasKey()}}),
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
