#include "engine/bridge/families/moe_parts.h"

#include <algorithm>
#include <utility>

namespace mbridge {

std::vector<TensorRule> ExpertTensors(const ExpertNames& names) {
  const std::string ours = "decoder.layers.{layer}.mlp.", layer = "model.layers.{layer}.", theirs = layer + names.block + ".";
  const std::string expert = theirs + "experts.{expert}.", shared = theirs + names.shared + ".", runtime = layer + "mlp.";
  return {{.ours = ours + "router.weight", .theirs = {theirs + "gate.weight"}, .runtime = {runtime + "gate.weight"}},
          {.ours = ours + "router.expert_bias", .theirs = {theirs + names.expert_bias}},
          {.ours = ours + "experts.linear_fc1.weight{expert}",
           .theirs = {expert + names.gate + ".weight", expert + names.up + ".weight"},
           .runtime = {runtime + "experts.gate_up_proj"}},
          {.ours = ours + "experts.linear_fc2.weight{expert}",
           .theirs = {expert + names.down + ".weight"},
           .runtime = {runtime + "experts.down_proj"}},
          {.ours = ours + "shared_experts.linear_fc1.weight", .theirs = {shared + "gate_proj.weight", shared + "up_proj.weight"}},
          {.ours = ours + "shared_experts.linear_fc2.weight", .theirs = {shared + "down_proj.weight"}},
          {.ours = ours + "shared_experts.gate_weight", .theirs = {theirs + "shared_expert_gate.weight"}}};
}

namespace {

// A number under any of the names; the first is written unless the source has another.
ConfigKey AliasedKey(std::vector<std::string> names, int64_t GptConfig::*field) {
  const auto present = [names](const auto& has) {
    const auto found = std::find_if(names.begin(), names.end(), has);
    return found == names.end() ? names.front() : *found;
  };
  const auto read = [present, field](ConfigReader* from, GptConfig* to) {
    to->*field = from->Int(present([from](const std::string& name) { return from->Has(name); }));
  };
  const auto write = [present, field](const GptConfig& from, Json* to) {
    (*to)[present([to](const std::string& name) { return to->contains(name); })] = from.*field;
  };
  return CustomKey(std::move(names), read, write);
}

}  // namespace

ConfigKey ExpertCountKey(std::vector<std::string> names) { return AliasedKey(std::move(names), &GptConfig::num_moe_experts); }

ConfigKey ExpertsPerTokenKey(std::vector<std::string> names) { return AliasedKey(std::move(names), &GptConfig::moe_router_topk); }

ConfigKey ExpertWidthKey() {
  return CustomKey(
      {}, [](ConfigReader*, GptConfig* to) { to->moe_ffn_hidden_size = to->ffn_hidden_size; }, nullptr);
}

std::vector<ConfigKey> DeepSeekExpertKeys() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t none = 0;
    to->moe_shared_expert_intermediate_size = from->Int("n_shared_experts", &none) * to->moe_ffn_hidden_size;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["n_shared_experts"] = from.moe_shared_expert_intermediate_size / std::max<int64_t>(1, from.moe_ffn_hidden_size);
  };
  return {ExpertCountKey({"n_routed_experts", "num_experts", "num_local_experts"}),
          ExpertsPerTokenKey({"num_experts_per_tok"}),
          IntKey("moe_intermediate_size", &GptConfig::moe_ffn_hidden_size),
          CustomKey({"n_shared_experts"}, read, write),
          RealKey("routed_scaling_factor", &GptConfig::moe_router_topk_scaling_factor, 1.0),
          FirstDenseKey(),
          RouterFreeKeys()};
}

ConfigKey SigmoidGroupsKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t one = 1;
    const int64_t groups = from->Int("n_group", &one), chosen = from->Int("topk_group", &one);
    if (groups <= 1) return;
    to->moe_router_num_groups = groups;
    to->moe_router_group_topk = chosen;
    to->moe_router_group_experts = 2;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["n_group"] = std::max<int64_t>(1, from.moe_router_num_groups);
    (*to)["topk_group"] = std::max<int64_t>(1, from.moe_router_group_topk);
  };
  return CustomKey({"n_group", "topk_group"}, read, write);
}

ConfigKey FirstDenseKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t none = 0, each = 1;
    const int64_t first = from->Int("first_k_dense_replace", &none),
                  every = std::max<int64_t>(1, from->Int("moe_layer_freq", &each));
    std::vector<int64_t> pattern;
    for (int64_t layer = 0; layer < to->num_layers; ++layer) pattern.push_back(layer >= first && layer % every == 0);
    to->moe_layer_freq = CanonicalPattern(std::move(pattern));
  };
  const auto write = [](const GptConfig& from, Json* to) {
    const auto& pattern = from.moe_layer_freq;
    (*to)["first_k_dense_replace"] = std::find(pattern.begin(), pattern.end(), 1) - pattern.begin();
    if (to->contains("moe_layer_freq")) (*to)["moe_layer_freq"] = 1;
  };
  return CustomKey({"first_k_dense_replace", "moe_layer_freq"}, read, write);
}

ConfigKey RouterFreeKeys() {
  return FreeKeys({"router_aux_loss_coef", "router_z_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size",
                   "router_dtype", "num_nextn_predict_layers"});
}

std::vector<int64_t> CanonicalPattern(std::vector<int64_t> pattern) {
  if (std::find(pattern.begin(), pattern.end(), 0) == pattern.end()) pattern.clear();
  return pattern;
}

}  // namespace mbridge
