// Qwen 1.5 and 2 MoE (a gated shared expert, biases of the query-key-value layer), Qwen 3 MoE.
#include <algorithm>

#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/moe_parts.h"

namespace mbridge {
namespace {

GptConfig Parts() {
  return {.normalization = NormKind::kRmsNorm,
          .activation = ActivationKind::kSwiGlu,
          .position_embedding = PositionKind::kRope,
          .add_bias_linear = false};
}

// A layer has experts if it is not listed and its number, from 1, is a multiple of the step.
ConfigKey SparseLayersKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t one = 1;
    const int64_t every = std::max<int64_t>(1, from->Int("decoder_sparse_step", &one));
    const Json& listed = from->Get("mlp_only_layers");
    std::vector<int64_t> pattern;
    for (int64_t layer = 0; layer < to->num_layers; ++layer) {
      const bool plain = std::find(listed.begin(), listed.end(), Json(layer)) != listed.end();
      pattern.push_back(!plain && (layer + 1) % every == 0);
    }
    to->moe_layer_freq = CanonicalPattern(std::move(pattern));
  };
  const auto write = [](const GptConfig& from, Json* to) {
    Json plain = Json::array();
    for (size_t layer = 0; layer < from.moe_layer_freq.size(); ++layer) {
      if (from.moe_layer_freq[layer] == 0) plain.push_back(layer);
    }
    (*to)["decoder_sparse_step"] = 1;
    (*to)["mlp_only_layers"] = plain;
  };
  return CustomKey({"decoder_sparse_step", "mlp_only_layers"}, read, write);
}

ConfigKey NormalisedKey(bool absent) {
  const auto read = [absent](ConfigReader* from, GptConfig* to) {
    to->moe_router_score = from->Flag("norm_topk_prob", &absent) ? RouterScore::kSoftmaxOfChosen : RouterScore::kSoftmax;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["norm_topk_prob"] = from.moe_router_score == RouterScore::kSoftmaxOfChosen;
  };
  return CustomKey({"norm_topk_prob"}, read, write);
}

std::vector<ConfigKey> Keys() {
  return JoinKeys(
      {DecoderKeys(),
       {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(),
        SlidingWindowKey(false), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
        IntKey("moe_intermediate_size", &GptConfig::moe_ffn_hidden_size), ExpertCountKey({"num_experts", "num_local_experts"}),
        IntKey("num_experts_per_tok", &GptConfig::moe_router_topk), NormalisedKey(false), SparseLayersKey(), RouterFreeKeys()}});
}

std::vector<TensorRule> Tensors(const std::string& shared) {
  return JoinTensors({EmbeddingAndHeadTensors(), PreNormTensors(), AttentionTensors(), GatedMlpTensors(),
                      ExpertTensors({.block = "mlp", .shared = shared})});
}

GptConfig Qwen2MoeParts() {
  GptConfig parts = Parts();
  parts.moe_shared_expert_gate = true;
  return parts;
}

GptConfig Qwen3MoeParts() {
  GptConfig parts = Parts();
  parts.qk_layernorm = true;
  return parts;
}

}  // namespace

const Architecture& Qwen2MoeArchitecture() {
  static const Architecture kQwen2Moe = {
      .model_type = "qwen2_moe",
      .class_name = "Qwen2MoeForCausalLM",
      .parts = Qwen2MoeParts(),
      .keys = JoinKeys({Keys(),
                        {IntKey("shared_expert_intermediate_size", &GptConfig::moe_shared_expert_intermediate_size),
                         FlagKey("qkv_bias", &GptConfig::add_qkv_bias, true)}}),
      .tensors = Tensors("shared_expert"),
      .unused = {kRotaryFrequencies}};
  return kQwen2Moe;
}

const Architecture& Qwen3MoeArchitecture() {
  static const Architecture kQwen3Moe = {.model_type = "qwen3_moe",
                                         .class_name = "Qwen3MoeForCausalLM",
                                         .parts = Qwen3MoeParts(),
                                         .keys = JoinKeys({Keys(), {AttentionBiasKey()}}),
                                         .tensors = Tensors("shared_experts"),
                                         .unused = {kRotaryFrequencies}};
  return kQwen3Moe;
}

}  // namespace mbridge
