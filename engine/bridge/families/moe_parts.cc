#include "engine/bridge/families/moe_parts.h"

#include <algorithm>

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

ConfigKey ExpertCountKey(std::vector<std::string> names) {
  const auto present = [names](const auto& has) {
    const auto found = std::find_if(names.begin(), names.end(), has);
    return found == names.end() ? names.front() : *found;
  };
  const auto read = [present](ConfigReader* from, GptConfig* to) {
    to->num_moe_experts = from->Int(present([from](const std::string& name) { return from->Has(name); }));
  };
  const auto write = [present](const GptConfig& from, Json* to) {
    (*to)[present([to](const std::string& name) { return to->contains(name); })] = from.num_moe_experts;
  };
  return CustomKey(names, read, write);
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
