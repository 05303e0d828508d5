#include "engine/train/model_parts.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "engine/model/rotary_tables.h"

namespace mbridge {
namespace {

struct ActivationName {
  ActivationKind kind;
  const char* function;
  bool gated;
};

constexpr ActivationName kActivations[] = {
    {ActivationKind::kGelu, "gelu", false},
    {ActivationKind::kGeluTanh, "gelu_pytorch_tanh", false},
    {ActivationKind::kSwiGlu, "silu", true},
    {ActivationKind::kSquaredRelu, "squared_relu", false},
    {ActivationKind::kGeglu, "gelu", true},
    {ActivationKind::kGegluTanh, "gelu_pytorch_tanh", true},
    {ActivationKind::kQuickGeglu, "quick_gelu", true},
};

// A number or a flag for each layer as a flag for each layer. `every`: what a single number N gives a layer i, counted from 1.
template <class List, class Every>
std::vector<int64_t> LayerPattern(const char* key, const List& list, int64_t num_layers, Every every,
                                  std::vector<FieldViolation>* problems) {
  std::vector<int64_t> pattern(list.begin(), list.end());
  if (pattern.size() == 1 && num_layers != 1) {
    const int64_t n = pattern[0];
    if (n < 1) {
      problems->push_back({key, fmt::format("is {}: at least 1, or a 0 or 1 for each layer", n)});
      return {};
    }
    pattern.clear();
    for (int64_t i = 1; i <= num_layers; ++i) pattern.push_back(every(i, n));
  }
  const bool flags = std::all_of(pattern.begin(), pattern.end(), [](int64_t flag) { return flag == 0 || flag == 1; });
  if (!flags || (!pattern.empty() && std::cmp_not_equal(pattern.size(), num_layers))) {
    problems->push_back(
        {key, fmt::format("has {} entries: one number, or a 0 or 1 for each of the {} layers", list.size(), num_layers)});
    return {};
  }
  return pattern;
}

void ReadYarn(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems) {
  if (!keys.has_yarn_rotary_scaling_factor()) {
    problems->push_back({"model.yarn_rotary_scaling_factor", "is missing with model.position_embedding_type=yarn"});
    return;
  }
  model->yarn_rotary_scaling_factor = keys.yarn_rotary_scaling_factor();
  model->rope_original_length = keys.has_yarn_original_max_position_embeddings()
                                    ? static_cast<double>(keys.yarn_original_max_position_embeddings())
                                    : 4096.0;
  if (keys.has_yarn_beta_fast()) model->yarn_beta_fast = keys.yarn_beta_fast();
  if (keys.has_yarn_beta_slow()) model->yarn_beta_slow = keys.yarn_beta_slow();
  if (keys.has_yarn_correction_range_round_to_int())
    model->yarn_correction_range_round_to_int = keys.yarn_correction_range_round_to_int();
  model->rope_attention_factor =
      YarnAttentionFactor(keys.yarn_rotary_scaling_factor(), keys.yarn_mscale(), keys.yarn_mscale_all_dim());
}

void ReadRope(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems) {
  model->rotary_base = keys.rotary_base();
  model->rotary_percent = keys.rotary_percent();
  model->rotary_interleaved = keys.rotary_interleaved();
  model->rotary_base_local = keys.rotary_base_local();
  model->seq_len_interpolation_factor = keys.seq_len_interpolation_factor();
  model->rope_scaling = keys.rope_scaling();
  if (model->rope_scaling) model->rope_scaling_factor = keys.rope_scaling_factor();
  if (keys.has_rope_low_freq_factor()) model->rope_low_freq_factor = keys.rope_low_freq_factor();
  if (keys.has_rope_high_freq_factor()) model->rope_high_freq_factor = keys.rope_high_freq_factor();
  if (keys.has_rope_original_length()) model->rope_original_length = keys.rope_original_length();
  model->rope_dynamic_factor = keys.rope_dynamic_factor();
  model->long_rope_short_factors = {keys.long_rope_short_factors().begin(), keys.long_rope_short_factors().end()};
  model->long_rope_long_factors = {keys.long_rope_long_factors().begin(), keys.long_rope_long_factors().end()};
  if (keys.position_embedding_type() == "yarn") ReadYarn(keys, model, problems);
  if (keys.has_rope_attention_factor()) model->rope_attention_factor = keys.rope_attention_factor();
}

void WriteRope(const GptConfig& model, v1::ModelConfig* keys) {
  const GptConfig none;
  keys->set_rotary_base(model.rotary_base);
  keys->set_rotary_percent(model.rotary_percent);
  keys->set_rope_scaling(model.rope_scaling);
  if (model.rotary_interleaved) keys->set_rotary_interleaved(true);
  if (model.rotary_base_local > 0) keys->set_rotary_base_local(model.rotary_base_local);
  if (model.seq_len_interpolation_factor > 0) keys->set_seq_len_interpolation_factor(model.seq_len_interpolation_factor);
  if (model.rope_scaling) {
    keys->set_rope_scaling_factor(model.rope_scaling_factor);
    keys->set_rope_low_freq_factor(model.rope_low_freq_factor);
    keys->set_rope_high_freq_factor(model.rope_high_freq_factor);
  }
  if (model.rope_original_length != none.rope_original_length) keys->set_rope_original_length(model.rope_original_length);
  if (model.rope_dynamic_factor > 0) keys->set_rope_dynamic_factor(model.rope_dynamic_factor);
  for (const double factor : model.long_rope_short_factors) keys->add_long_rope_short_factors(factor);
  for (const double factor : model.long_rope_long_factors) keys->add_long_rope_long_factors(factor);
  if (model.yarn_rotary_scaling_factor > 0) {
    keys->set_position_embedding_type("yarn");
    keys->set_yarn_rotary_scaling_factor(model.yarn_rotary_scaling_factor);
    keys->set_yarn_original_max_position_embeddings(static_cast<int64_t>(model.rope_original_length));
    keys->set_yarn_beta_fast(model.yarn_beta_fast);
    keys->set_yarn_beta_slow(model.yarn_beta_slow);
    keys->set_yarn_correction_range_round_to_int(model.yarn_correction_range_round_to_int);
    keys->clear_rope_original_length();
  }
  const bool scaled = model.yarn_rotary_scaling_factor > 0 || model.rope_attention_factor != 1;
  if (scaled) keys->set_rope_attention_factor(model.rope_attention_factor);
}

void ReadRecompute(const v1::ModelConfig& keys, GptConfig* model) {
  if (keys.recompute_granularity() == "full") {
    model->recompute = keys.recompute_method() == "block" ? Recompute::kBlock : Recompute::kUniform;
    model->recompute_num_layers = keys.recompute_num_layers();
  } else if (keys.recompute_granularity() == "selective") {
    model->recompute = Recompute::kSelective;
    const auto& names = keys.recompute_modules();
    const auto has = [&names](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    model->recompute_modules = {.core_attention = names.empty() || has("core_attn"),
                                .mlp = has("mlp"),
                                .layernorm = has("layernorm"),
                                .mla_up_proj = has("mla_up_proj"),
                                .moe = has("moe"),
                                .moe_act = has("moe_act")};
  }
}

void ReadGatedDelta(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems) {
  constexpr const char* kFrequency = "model.linear_attention_freq";
  const bool wanted = !keys.linear_attention_freq().empty();
  if (wanted != keys.has_experimental_attention_variant()) {
    problems->push_back(wanted ? FieldViolation{"model.experimental_attention_variant",
                                                fmt::format("is missing with {}: gated_delta_net", kFrequency)}
                               : FieldViolation{kFrequency, "is missing with model.experimental_attention_variant"});
    return;
  }
  if (!wanted) return;
  const std::vector<int64_t> linear = LayerPattern(
      kFrequency, keys.linear_attention_freq(), model->num_layers, [](int64_t layer, int64_t n) { return layer % n != 0; },
      problems);
  for (const int64_t flag : linear) model->mixers.push_back(flag == 1 ? MixerKind::kGatedDeltaNet : MixerKind::kAttention);
  model->linear_conv_kernel_dim = keys.linear_conv_kernel_dim();
  model->linear_key_head_dim = keys.linear_key_head_dim();
  model->linear_value_head_dim = keys.linear_value_head_dim();
  model->linear_num_key_heads = keys.linear_num_key_heads();
  model->linear_num_value_heads = keys.linear_num_value_heads();
}

void WriteGatedDelta(const GptConfig& model, v1::ModelConfig* keys) {
  if (CountLayers(model, HasGatedDelta) == 0) return;
  keys->set_experimental_attention_variant("gated_delta_net");
  for (int64_t layer = 0; layer < model.num_layers; ++layer) keys->add_linear_attention_freq(HasGatedDelta(model, layer) ? 1 : 0);
  keys->set_linear_conv_kernel_dim(model.linear_conv_kernel_dim);
  keys->set_linear_key_head_dim(model.linear_key_head_dim);
  keys->set_linear_value_head_dim(model.linear_value_head_dim);
  keys->set_linear_num_key_heads(model.linear_num_key_heads);
  keys->set_linear_num_value_heads(model.linear_num_value_heads);
}

}  // namespace

void ReadActivation(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems) {
  std::string known;
  for (const ActivationName& name : kActivations) {
    if (name.gated != keys.gated_linear_unit()) continue;
    if (name.function == keys.activation_func()) {
      model->activation = name.kind;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(name.function);
  }
  problems->push_back({"model.activation_func", fmt::format("is {}, which is not built with model.gated_linear_unit={}: {}",
                                                            keys.activation_func(), keys.gated_linear_unit(), known)});
}

void WriteActivation(const GptConfig& model, v1::ModelConfig* keys) {
  for (const ActivationName& name : kActivations) {
    if (name.kind != model.activation) continue;
    keys->set_activation_func(name.function);
    keys->set_gated_linear_unit(name.gated);
  }
}

void ReadModelParts(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems) {
  model->qk_norm_over_projection = keys.qk_norm_over_projection();
  if (keys.has_pre_layernorm()) model->pre_layernorm = keys.pre_layernorm();
  model->post_layernorm = keys.post_layernorm();
  model->layernorm_zero_centered_gamma = keys.layernorm_zero_centered_gamma();
  model->softmax_scale = keys.softmax_scale();
  model->attn_logit_softcapping = keys.attn_logit_softcapping();
  model->final_logit_softcapping = keys.final_logit_softcapping();
  if (keys.has_embedding_multiplier()) model->embedding_multiplier = keys.embedding_multiplier();
  if (keys.has_residual_multiplier()) model->residual_multiplier = keys.residual_multiplier();
  if (keys.has_logits_scaling()) model->logits_scaling = keys.logits_scaling();
  model->window_attn_skip_freq = LayerPattern(
      "model.window_attn_skip_freq", keys.window_attn_skip_freq(), model->num_layers,
      [](int64_t layer, int64_t n) { return layer % n != 0; }, problems);
  model->no_rope_freq = LayerPattern(
      "model.no_rope_freq", keys.no_rope_freq(), model->num_layers, [](int64_t layer, int64_t n) { return layer % n == 0; },
      problems);
  model->attention_output_gate = keys.attention_output_gate();
  ReadGatedDelta(keys, model, problems);
  if (model->position_embedding == PositionKind::kRope) ReadRope(keys, model, problems);
  ReadRecompute(keys, model);
  model->deterministic = keys.deterministic_mode();
}

void WriteModelParts(const GptConfig& model, v1::ModelConfig* keys) {
  if (model.qk_norm_over_projection) keys->set_qk_norm_over_projection(true);
  if (!model.pre_layernorm) keys->set_pre_layernorm(false);
  if (model.post_layernorm) keys->set_post_layernorm(true);
  if (model.layernorm_zero_centered_gamma) keys->set_layernorm_zero_centered_gamma(true);
  if (model.softmax_scale > 0) keys->set_softmax_scale(model.softmax_scale);
  if (model.attn_logit_softcapping > 0) keys->set_attn_logit_softcapping(model.attn_logit_softcapping);
  if (model.final_logit_softcapping > 0) keys->set_final_logit_softcapping(model.final_logit_softcapping);
  if (model.embedding_multiplier != 1) keys->set_embedding_multiplier(model.embedding_multiplier);
  if (model.residual_multiplier != 1) keys->set_residual_multiplier(model.residual_multiplier);
  if (model.logits_scaling != 1) keys->set_logits_scaling(model.logits_scaling);
  for (const int64_t flag : model.window_attn_skip_freq) keys->add_window_attn_skip_freq(flag);
  for (const int64_t flag : model.no_rope_freq) keys->add_no_rope_freq(flag);
  if (model.attention_output_gate) keys->set_attention_output_gate(true);
  WriteGatedDelta(model, keys);
  if (model.position_embedding == PositionKind::kRope) WriteRope(model, keys);
}

}  // namespace mbridge
