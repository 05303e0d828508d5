// Mixture of experts and multi-latent attention: what fits together, and what the engine does not have.
#include <algorithm>

#include "recipes/config/validate.h"

namespace mbridge::recipes {
namespace {

std::string Number(int64_t value) { return std::to_string(value); }

}  // namespace

std::vector<FieldViolation> UnsupportedExpertParts(const v1::ModelConfig& m) {
  constexpr const char* kMissing = ", which needs an engine part that this version does not have; accepted: ";
  std::vector<FieldViolation> parts;
  const auto refuse = [&](bool wanted, const char* key, const std::string& value, const std::string& accepted) {
    if (wanted) parts.push_back({key, "is " + value + kMissing + accepted});
  };
  const bool experts = m.num_moe_experts() > 0;
  refuse(m.softmax_type() == "off-by-one", "model.softmax_type", "off-by-one", "vanilla, learnable");
  refuse(!experts && m.glu_linear_offset() != 0, "model.glu_linear_offset", "set without experts", "0");
  refuse(!experts && m.activation_func_clamp_value() != 0, "model.activation_func_clamp_value", "set without experts",
         "leave it out");
  if (m.multi_latent_attention()) {
    refuse(m.normalization() != "RMSNorm", "model.normalization", m.normalization() + " with model.multi_latent_attention",
           "RMSNorm");
    refuse(!m.qk_layernorm(), "model.qk_layernorm", "false with model.multi_latent_attention", "true");
    refuse(m.add_bias_linear(), "model.add_bias_linear", "true with model.multi_latent_attention", "false");
    refuse(m.add_qkv_bias(), "model.add_qkv_bias", "true with model.multi_latent_attention", "false");
    refuse(m.position_embedding_type() != "rope", "model.position_embedding_type",
           m.position_embedding_type() + " with model.multi_latent_attention", "rope (YaRN: model.rope_type=yarn)");
  }
  if (!experts) return parts;
  const bool gate = m.activation_func() == "silu" || m.activation_func() == "quick_gelu";
  refuse(!m.gated_linear_unit() || !gate, "model.activation_func", m.activation_func() + " with experts",
         "silu or quick_gelu with model.gated_linear_unit=true");
  refuse(m.add_bias_linear() && m.moe_shared_expert_intermediate_size() > 0, "model.add_bias_linear", "true with shared experts",
         "false");
  const std::string& balancing = m.moe_router_load_balancing_type();
  refuse(balancing == "global_aux_loss" || balancing == "sinkhorn", "model.moe_router_load_balancing_type", balancing,
         "aux_loss, seq_aux_loss, none");
  refuse(m.moe_router_dtype() == "fp64", "model.moe_router_dtype", "fp64", "fp32, or leave it out");
  refuse(m.moe_router_score_function() == "sqrtsoftplus", "model.moe_router_score_function", "sqrtsoftplus", "softmax, sigmoid");
  return parts;
}

void ValidateExperts(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  if (m.num_moe_experts() == 0) return;
  const int64_t experts = m.num_moe_experts(), k = m.moe_router_topk(), groups = m.moe_router_num_groups();
  if (experts < 2) state->Fail("model.num_moe_experts", "is " + Number(experts) + "; allowed: 2 or more, or leave it out");
  if (k > experts) {
    state->Fail("model.moe_router_topk",
                "is " + Number(k) + "; allowed: 1 .. model.num_moe_experts, which is " + Number(experts));
  }
  const auto& freq = m.moe_layer_freq();
  const bool flags = std::all_of(freq.begin(), freq.end(), [](int64_t flag) { return flag == 0 || flag == 1; });
  const bool every = freq.size() == 1 && freq[0] >= 1;
  if (!freq.empty() && !every && !(flags && freq.size() == m.num_layers())) {
    state->Fail("model.moe_layer_freq", "is " + state->Text("model.moe_layer_freq") +
                                            "; allowed: one number from 1 on, or a 0 or 1 for each of the " +
                                            Number(m.num_layers()) + " layers");
  }
  if (m.moe_router_enable_expert_bias() && m.moe_router_score_function() != "sigmoid") {
    state->Fail("model.moe_router_enable_expert_bias", "is true; allowed: only with model.moe_router_score_function=sigmoid");
  }
  if (m.moe_shared_expert_gate() && m.moe_shared_expert_intermediate_size() == 0) {
    state->Fail("model.moe_shared_expert_gate", "is true; allowed: only with model.moe_shared_expert_intermediate_size");
  }
  if (groups == 0) return;
  if (experts % groups != 0) {
    return state->Fail("model.moe_router_num_groups",
                       "is " + Number(groups) + "; allowed: divisors of model.num_moe_experts " + Number(experts));
  }
  const int64_t chosen = m.moe_router_group_topk(), size = experts / groups;
  if (chosen < 1 || chosen > groups || k > chosen * size) {
    state->Fail("model.moe_router_group_topk", "is " + Number(chosen) + "; allowed: 1 .. model.moe_router_num_groups " +
                                                   Number(groups) + ", with " + Number(k) + " or more experts in the groups");
  }
  const int64_t scored = m.moe_router_group_experts() > 0 ? m.moe_router_group_experts() : k / std::max<int64_t>(1, chosen);
  if (scored > size) {
    state->Fail("model.moe_router_group_experts",
                "is " + Number(scored) + "; allowed: 1 .. " + Number(size) + ", the experts of a group");
  }
}

}  // namespace mbridge::recipes
