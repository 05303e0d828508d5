// Qwen 1.5 and 2 MoE (a gated shared expert, biases of the query-key-value layer), Qwen 3 MoE, Qwen3-Next (gated delta net in
// most layers, attention with an output gate in the others).
#include <algorithm>
#include <utility>

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

// Which layers have attention: layer_types, in older files every full_attention_interval-th.
ConfigKey MixersKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t four = 4, interval = std::max<int64_t>(1, from->Int("full_attention_interval", &four));
    const Json& types = from->Get("layer_types");
    bool fits = types.is_null() || (types.is_array() && std::cmp_equal(types.size(), to->num_layers));
    to->mixers.clear();
    for (int64_t layer = 0; fits && layer < to->num_layers; ++layer) {
      const bool linear = types.is_null() ? (layer + 1) % interval != 0 : types[layer] == "linear_attention";
      fits = linear || types.is_null() || types[layer] == "full_attention";
      to->mixers.push_back(linear ? MixerKind::kGatedDeltaNet : MixerKind::kAttention);
    }
    if (!fits) from->Unsupported("layer_types", "linear_attention or full_attention for each layer");
    if (CountLayers(*to, HasGatedDelta) == 0) to->mixers.clear();
  };
  const auto write = [](const GptConfig& from, Json* to) {
    Json types = Json::array();
    for (int64_t layer = 0; layer < from.num_layers; ++layer)
      types.push_back(HasGatedDelta(from, layer) ? "linear_attention" : "full_attention");
    (*to)["layer_types"] = types;
  };
  return CustomKey({"layer_types", "full_attention_interval"}, read, write);
}

ConfigKey SizeKey(const char* name, int64_t GptConfig::*field, int64_t absent) {
  return IntKey(name, field, [absent](const GptConfig&) { return absent; });
}

// Theirs: for each head its query and its gate, then keys, then values. Ours, group after group: queries, gates, key, value.
std::vector<RowRun> GatedQkvRows(const GptConfig& c, int64_t) {
  const int64_t head = c.kv_channels, groups = c.num_query_groups, queries = c.num_attention_heads / groups;
  const int64_t keys = 2 * c.num_attention_heads * head, values = keys + groups * head;
  std::vector<RowRun> runs;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t ours = group * 2 * (queries + 1) * head;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t theirs = 2 * (group * queries + i) * head;
      runs.push_back({ours + i * head, theirs, head});
      runs.push_back({ours + (queries + i) * head, theirs + head, head});
    }
    runs.push_back({ours + 2 * queries * head, keys + group * head, head});
    runs.push_back({ours + (2 * queries + 1) * head, values + group * head, head});
  }
  return runs;
}
std::vector<int64_t> GatedQkvParts(const GptConfig& c) {
  const int64_t keys = c.num_query_groups * c.kv_channels;
  return {2 * c.num_attention_heads * c.kv_channels, keys, keys};
}

// Theirs: for each key head its query, key, values and output gates, then for each its values' beta and decay. Ours: of all heads
// the queries, keys, values, output gates, betas, decays.
std::vector<RowRun> DeltaRows(const GptConfig& c, int64_t rows) {
  const int64_t key = c.linear_key_head_dim, heads = c.linear_num_key_heads, ratio = c.linear_num_value_heads / heads;
  const int64_t value = ratio * c.linear_value_head_dim, block = 2 * key + 2 * value;
  const int64_t small = heads * block;  // The first row of the betas, on both sides.
  std::vector<RowRun> runs;
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t theirs = i * block, values = 2 * heads * key + i * value;
    runs.push_back({i * key, theirs, key});
    runs.push_back({(heads + i) * key, theirs + key, key});
    runs.push_back({values, theirs + 2 * key, value});
    runs.push_back({values + heads * value, theirs + 2 * key + value, value});
    runs.push_back({small + i * ratio, small + 2 * i * ratio, ratio});
    runs.push_back({small + (heads + i) * ratio, small + (2 * i + 1) * ratio, ratio});
  }
  return runs;
}
std::vector<int64_t> DeltaParts(const GptConfig& c) {
  const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim,
                values = c.linear_num_value_heads * c.linear_value_head_dim;
  return {2 * (keys + values), 2 * c.linear_num_value_heads};
}

std::vector<TensorRule> NextMixerTensors() {
  const std::string ours = "decoder.layers.{layer}.self_attention.", theirs = "model.layers.{layer}.";
  const std::string delta = theirs + "linear_attn.", attention = theirs + "self_attn.";
  return {{.ours = ours + "linear_qkv.weight",
           .theirs = {attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"},
           .order = GatedQkvRows,
           .part_rows = GatedQkvParts},
          {.ours = ours + "in_proj.weight",
           .theirs = {delta + "in_proj_qkvz.weight", delta + "in_proj_ba.weight"},
           .order = DeltaRows,
           .part_rows = DeltaParts},
          {.ours = ours + "conv1d.weight", .theirs = {delta + "conv1d.weight"}},
          {.ours = ours + "dt_bias", .theirs = {delta + "dt_bias"}},
          {.ours = ours + "A_log", .theirs = {delta + "A_log"}},
          {.ours = ours + "out_norm.weight", .theirs = {delta + "norm.weight"}},
          {.ours = ours + "out_proj.weight", .theirs = {delta + "out_proj.weight"}}};
}

// The layer that guesses the token after the next, which training here does without.
std::vector<std::string> NextTokenTensors() {
  std::vector<std::string> names = {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight",
                                    "mtp.pre_fc_norm_hidden.weight"};
  const std::string layer = "mtp.layers.{layer}.";
  for (const char* name :
       {"input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate", "mlp.shared_expert_gate",
        "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj",
        "mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj", "mlp.experts.{expert}.down_proj"}) {
    names.push_back(layer + name + ".weight");
  }
  return names;
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

GptConfig Qwen3NextParts() {
  GptConfig parts = Qwen3MoeParts();
  parts.layernorm_zero_centered_gamma = true;
  parts.attention_output_gate = true;
  parts.moe_shared_expert_gate = true;
  return parts;
}

std::vector<ConfigKey> Qwen3NextKeys() {
  return JoinKeys(
      {DecoderKeys(256),
       {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey({.percent = 0.25}),
        OnlyKey("attention_bias", false), OnlyKey("use_sliding_window", false),
        FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false), MixersKey(),
        SizeKey("linear_conv_kernel_dim", &GptConfig::linear_conv_kernel_dim, 4),
        SizeKey("linear_key_head_dim", &GptConfig::linear_key_head_dim, 128),
        SizeKey("linear_value_head_dim", &GptConfig::linear_value_head_dim, 128),
        SizeKey("linear_num_key_heads", &GptConfig::linear_num_key_heads, 16),
        SizeKey("linear_num_value_heads", &GptConfig::linear_num_value_heads, 32),
        IntKey("moe_intermediate_size", &GptConfig::moe_ffn_hidden_size), ExpertCountKey({"num_experts", "num_local_experts"}),
        IntKey("shared_expert_intermediate_size", &GptConfig::moe_shared_expert_intermediate_size),
        IntKey("num_experts_per_tok", &GptConfig::moe_router_topk), NormalisedKey(true), SparseLayersKey(), RouterFreeKeys()}});
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

const Architecture& Qwen3NextArchitecture() {
  static const Architecture kQwen3Next = {.model_type = "qwen3_next",
                                          .class_name = "Qwen3NextForCausalLM",
                                          .parts = Qwen3NextParts(),
                                          .keys = Qwen3NextKeys(),
                                          .tensors = JoinTensors({NextMixerTensors(), Tensors("shared_expert")}),
                                          .unused = NextTokenTensors()};
  return kQwen3Next;
}

}  // namespace mbridge
