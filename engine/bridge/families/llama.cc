// Llama 1 to 3.3, Mistral, which is Llama with a sliding window, and SmolLM3, some of whose layers have no rotation.
#include <algorithm>
#include <utility>

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

std::vector<ConfigKey> Keys(RopeDefaults rope = {}, bool tied = false) {
  return JoinKeys({DecoderKeys(),
                   {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(rope),
                    FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, tied)}});
}

// no_rope_layers: 1 for a layer that has the rotation, in spite of the name; without it, all but every no_rope_layer_interval-th.
ConfigKey NoRopeLayersKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t four = 4, interval = std::max<int64_t>(1, from->Int("no_rope_layer_interval", &four));
    const Json& listed = from->Get("no_rope_layers");
    bool fits = listed.is_null() || (listed.is_array() && std::cmp_greater_equal(listed.size(), to->num_layers));
    for (int64_t layer = 0; fits && layer < to->num_layers; ++layer) {
      const bool turned = listed.is_null() ? (layer + 1) % interval != 0 : listed[layer] == 1;
      fits = turned || listed.is_null() || listed[layer] == 0;
      to->no_rope_freq.push_back(turned ? 0 : 1);
    }
    if (!fits) from->Unsupported("no_rope_layers", "a 0 or 1 for each layer");
    const bool none = false;
    if (from->Flag("use_sliding_window", &none) && !from->Has("layer_types"))
      from->Fault("layer_types", "is missing with use_sliding_window");
  };
  const auto write = [](const GptConfig& from, Json* to) {
    Json listed = Json::array();
    for (int64_t layer = 0; layer < from.num_layers; ++layer) listed.push_back(HasRope(from, layer) ? 1 : 0);
    (*to)["no_rope_layers"] = listed;
  };
  return CustomKey({"no_rope_layers", "no_rope_layer_interval"}, read, write);
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

const Architecture& SmolLm3Architecture() {
  static const Architecture kSmolLm3 = {
      .model_type = "smollm3",
      .class_name = "SmolLM3ForCausalLM",
      .parts = kParts,
      .keys = JoinKeys({Keys({.base = 2000000}, true), {LinearBiasKey(), SlidingWindowKey(false), NoRopeLayersKey()}}),
      .tensors = Tensors(),
      .unused = {kRotaryFrequencies}};
  return kSmolLm3;
}

}  // namespace mbridge
