// Layers with other mixers than attention: what fits together, and what the engine does not have.
#include <algorithm>

#include "recipes/config/validate.h"

namespace mbridge::recipes {
namespace {

std::string Number(int64_t value) { return std::to_string(value); }

constexpr const char* kPattern = "model.hybrid_layer_pattern";
constexpr const char* kLetters = "M*-EP";

bool HasAny(const v1::ModelConfig& m, const char* letters) {
  return m.hybrid_layer_pattern().find_first_of(letters) != std::string::npos;
}

void ValidatePattern(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  const std::string& pattern = m.hybrid_layer_pattern();
  const size_t unknown = pattern.find_first_not_of(kLetters);
  if (unknown != std::string::npos) {
    return state->Fail(kPattern, std::string("has the letter ") + pattern[unknown] +
                                     "; allowed: M (Mamba-2), * (attention), - (MLP), E (experts), P (attention and Mamba-2 side "
                                     "by side, then an MLP)");
  }
  if (static_cast<int64_t>(pattern.size()) != m.num_layers()) {
    state->Fail(kPattern, "has " + Number(static_cast<int64_t>(pattern.size())) +
                              " letters; allowed: one for each of the model.num_layers " + Number(m.num_layers()) + " layers");
  }
  const bool experts = m.num_moe_experts() > 0;
  if (HasAny(m, "E") != experts)
    state->Fail(kPattern, experts ? "has no E, and model.num_moe_experts is set; leave that out, or use E"
                                  : "has an E; allowed: with model.num_moe_experts");
  const auto& freq = m.moe_layer_freq();
  if (freq.size() > 1 || (freq.size() == 1 && freq[0] != 1))
    state->Fail("model.moe_layer_freq", std::string("is set; allowed: not beside ") + kPattern + ", whose letters E say it");
}

void ValidateMamba(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  const int64_t head = std::max<int64_t>(1, m.mamba_head_dim()), inner = 2 * m.hidden_size();
  if (!m.has_mamba_num_heads() && inner % head != 0) {
    return state->Fail("model.mamba_head_dim", "is " + Number(head) + "; allowed: divisors of 2 * model.hidden_size " +
                                                   Number(inner) + ", or set model.mamba_num_heads");
  }
  const int64_t heads = m.has_mamba_num_heads() ? m.mamba_num_heads() : inner / head;
  const int64_t groups = std::max<int64_t>(1, m.mamba_num_groups()), ranks = std::max<int64_t>(1, m.tensor_model_parallel_size());
  if (heads % groups != 0)
    state->Fail("model.mamba_num_groups", "is " + Number(groups) + "; allowed: divisors of the " + Number(heads) + " heads");
  const int64_t norms = m.has_mamba_norm_groups() ? m.mamba_norm_groups() : groups;
  if (heads * head % norms != 0) {
    state->Fail("model.mamba_norm_groups",
                "is " + Number(norms) + "; allowed: divisors of the mixer's width " + Number(heads * head));
  }
  for (const auto& [what, count] : {std::pair{"model.mamba_num_groups", groups}, std::pair{"model.mamba_norm_groups", norms}}) {
    const bool counts = count == groups || !m.has_mamba_rms_norm() || m.mamba_rms_norm();
    if (!counts || count % ranks == 0) continue;
    state->Fail("model.tensor_model_parallel_size",
                "is " + Number(ranks) + "; allowed: divisors of " + what + " " + Number(count));
  }
  if (m.has_mamba_dt_max() && m.mamba_dt_max() < m.mamba_dt_min()) {
    state->Fail("model.mamba_dt_max", "is " + state->Text("model.mamba_dt_max") + "; allowed: >= model.mamba_dt_min, which is " +
                                          state->Text("model.mamba_dt_min"));
  }
  if (m.mamba_multipliers_size() != 0 && m.mamba_multipliers_size() != 5) {
    state->Fail("model.mamba_multipliers",
                "has " + Number(m.mamba_multipliers_size()) + " values; allowed: 5, for z, x, B, C and dt");
  }
}

}  // namespace

void ValidateMixers(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  if (!m.has_hybrid_layer_pattern()) {
    if (m.is_hybrid_model()) state->Fail(kPattern, "is not set; model.is_hybrid_model=true needs it, a letter for each layer");
    return;
  }
  ValidatePattern(state);
  if (HasAny(m, "MP")) ValidateMamba(state);
}

std::vector<FieldViolation> UnsupportedMixerParts(const v1::ModelConfig& m) {
  std::vector<FieldViolation> parts;
  const auto refuse = [&](bool wanted, const char* key, const std::string& value, const std::string& accepted) {
    if (wanted)
      parts.push_back(
          {key, "is " + value + ", which needs an engine part that this version does not have; accepted: " + accepted});
  };
  const auto set = [](bool has, double value) { return has && value != 1; };
  const bool attention = set(m.has_attention_in_multiplier(), m.attention_in_multiplier()) ||
                         set(m.has_attention_out_multiplier(), m.attention_out_multiplier()) ||
                         set(m.has_key_multiplier(), m.key_multiplier());
  const bool gate = set(m.has_mlp_gate_multiplier(), m.mlp_gate_multiplier());
  const bool mlp = gate || set(m.has_mlp_out_multiplier(), m.mlp_out_multiplier());
  const bool mamba = HasAny(m, "MP"), input = set(m.has_mamba_in_multiplier(), m.mamba_in_multiplier());
  const bool delta = !m.linear_attention_freq().empty();
  refuse(
      (delta || m.attention_output_gate()) && m.tensor_model_parallel_size() > 1, "model.tensor_model_parallel_size",
      Number(m.tensor_model_parallel_size()) + " with " + (delta ? "model.linear_attention_freq" : "model.attention_output_gate"),
      "1");
  refuse((attention || mlp || (mamba && input)) && m.add_bias_linear(), "model.add_bias_linear", "true with multipliers",
         "false");
  refuse((attention || mlp) && m.add_qkv_bias(), "model.add_qkv_bias", "true with multipliers", "false");
  refuse((attention || mlp) && m.add_attention_output_bias(), "model.add_attention_output_bias", "true with multipliers",
         "false");
  refuse((attention || mlp) && m.add_mlp_bias(), "model.add_mlp_bias", "true with multipliers", "false");
  refuse((attention || mlp || mamba) && m.post_layernorm(), "model.post_layernorm",
         std::string("true with ") + (mamba ? "Mamba-2 mixers" : "multipliers"), "false");
  refuse(attention && m.qk_layernorm(), "model.qk_layernorm", "true with multipliers of attention", "false");
  refuse(attention && m.multi_latent_attention(), "model.multi_latent_attention", "true with multipliers of attention", "false");
  refuse(gate && !m.gated_linear_unit(), "model.mlp_gate_multiplier", "set without model.gated_linear_unit", "leave it out");
  refuse(mlp && m.num_moe_experts() > 0, "model.mlp_out_multiplier", "set with experts", "leave it out");
  return parts;
}

}  // namespace mbridge::recipes
