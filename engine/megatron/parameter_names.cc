#include "engine/megatron/parameter_names.h"

#include <charconv>
#include <string_view>

#include <fmt/format.h>

namespace mbridge {
namespace {

constexpr std::string_view kLayers = "decoder.layers.";

// A norm and the linear layer behind it, into which Transformer Engine fuses it.
struct FusedNorm {
  std::string_view norm, linear;
};
constexpr FusedNorm kFusedNorms[] = {
    {"input_layernorm.", "self_attention.linear_qkv.layer_norm_"},
    {"pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"},
    {"self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"},
    {"self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"},
};

// What follows "decoder.layers.<n>." with the index of an expert apart.
struct LayerName {
  std::string rest;
  std::vector<LeadingIndex> lead;
};

// "mlp.experts.linear_fc1.weight3"
bool SplitExpertName(std::string_view rest, std::string* tensor, int64_t* expert) {
  constexpr std::string_view kExperts = "mlp.experts.linear_fc";
  if (!rest.starts_with(kExperts)) return false;
  const size_t digits = rest.find_last_not_of("0123456789") + 1;
  if (digits == rest.size()) return false;
  std::from_chars(rest.data() + digits, rest.data() + rest.size(), *expert);
  *tensor = rest.substr(0, digits);
  return true;
}

std::vector<LayerName> LayerNames(const std::string& rest, int64_t num_experts) {
  std::string tensor;
  int64_t expert = 0;
  if (SplitExpertName(rest, &tensor, &expert)) {
    const std::string name = tensor.substr(std::string_view("mlp.experts.").size());
    return {{"mlp.experts.experts." + name, {{expert, num_experts}}},
            {fmt::format("mlp.experts.experts.{}.{}", expert, name), {}},
            {fmt::format("mlp.experts.local_experts.{}.{}", expert, name), {}},
            {rest, {}}};
  }
  std::vector<LayerName> names;
  for (const FusedNorm& fused : kFusedNorms) {
    if (rest.starts_with(fused.norm)) names.push_back({std::string(fused.linear) + rest.substr(fused.norm.size()), {}});
  }
  names.push_back({rest, {}});
  return names;
}

}  // namespace

bool SplitLayerName(const std::string& name, int64_t* layer, size_t* rest) {
  if (!name.starts_with(kLayers)) return false;
  const char* end = name.data() + name.size();
  const auto [after, error] = std::from_chars(name.data() + kLayers.size(), end, *layer);
  if (error != std::errc() || after == end || *after != '.' || *layer < 0) return false;
  *rest = static_cast<size_t>(after - name.data()) + 1;
  return true;
}

std::vector<WrittenName> WrittenNames(const std::string& rest, bool latent_attention, bool moe_layer) {
  std::string tensor;
  int64_t expert = 0;
  if (SplitExpertName(rest, &tensor, &expert))
    return {{"mlp.experts.experts." + tensor.substr(std::string_view("mlp.experts.").size()), expert}};
  for (const FusedNorm& fused : kFusedNorms) {
    if (!rest.starts_with(fused.norm)) continue;
    const std::string other = std::string(fused.linear) + rest.substr(fused.norm.size());
    const bool input = fused.norm.starts_with("input"), mlp = fused.norm.starts_with("pre_mlp");
    if (input) return {{latent_attention ? rest : other}};
    if (mlp && !moe_layer && !latent_attention) return {{other}};
    if (mlp && moe_layer && latent_attention) return {{rest}};
    if (mlp || latent_attention) return {{rest}, {other}};
  }
  return {{rest}};
}

std::vector<StoredForm> StoredForms(const std::string& ours, int64_t num_layers, int64_t num_experts) {
  int64_t layer = 0;
  size_t rest = 0;
  if (!SplitLayerName(ours, &layer, &rest)) return {{{ours, {}}}};
  std::vector<StoredForm> forms;
  const auto add = [&](const std::string& key, const std::vector<LeadingIndex>& lead) {
    forms.push_back({{key, lead}});
    if (key.find("linear_fc1.") != std::string::npos) forms.push_back({{key + "_w", lead}, {key + "_v", lead}});
  };
  for (const LayerName& name : LayerNames(ours.substr(rest), num_experts)) {
    std::vector<LeadingIndex> lead = {{layer, num_layers}};
    lead.insert(lead.end(), name.lead.begin(), name.lead.end());
    add(std::string(kLayers) + name.rest, lead);
    add(fmt::format("{}{}.{}", kLayers, layer, name.rest), name.lead);
  }
  return forms;
}

}  // namespace mbridge
