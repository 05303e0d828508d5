#include "engine/train/mixer_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace mbridge {
namespace {

using Problems = std::vector<FieldViolation>;

// A letter of model.hybrid_layer_pattern.
struct LayerLetter {
  char letter;
  MixerKind mixer;
  bool mlp;
  bool experts;
};

constexpr LayerLetter kLetters[] = {
    {'M', MixerKind::kMamba2, false, false},
    {'*', MixerKind::kAttention, false, false},
    {'-', MixerKind::kNone, true, false},
    {'E', MixerKind::kNone, true, true},
    {'P', MixerKind::kAttentionAndMamba2, true, false},
};

bool AnyMamba(const GptConfig& gpt) { return CountLayers(gpt, HasMamba) > 0; }

// The multipliers and the keys that they are.
template <class Visit> void ForEachMultiplier(Visit&& visit) {
  using Keys = v1::ModelConfig;
  visit(&GptConfig::attention_in_multiplier, &Keys::has_attention_in_multiplier, &Keys::attention_in_multiplier,
        &Keys::set_attention_in_multiplier);
  visit(&GptConfig::attention_out_multiplier, &Keys::has_attention_out_multiplier, &Keys::attention_out_multiplier,
        &Keys::set_attention_out_multiplier);
  visit(&GptConfig::key_multiplier, &Keys::has_key_multiplier, &Keys::key_multiplier, &Keys::set_key_multiplier);
  visit(&GptConfig::mlp_gate_multiplier, &Keys::has_mlp_gate_multiplier, &Keys::mlp_gate_multiplier,
        &Keys::set_mlp_gate_multiplier);
  visit(&GptConfig::mlp_out_multiplier, &Keys::has_mlp_out_multiplier, &Keys::mlp_out_multiplier, &Keys::set_mlp_out_multiplier);
  visit(&GptConfig::mamba_in_multiplier, &Keys::has_mamba_in_multiplier, &Keys::mamba_in_multiplier,
        &Keys::set_mamba_in_multiplier);
  visit(&GptConfig::mamba_out_multiplier, &Keys::has_mamba_out_multiplier, &Keys::mamba_out_multiplier,
        &Keys::set_mamba_out_multiplier);
}

void ReadMamba(const v1::ModelConfig& model, GptConfig* gpt, Problems* problems) {
  gpt->mamba_state_dim = model.mamba_state_dim();
  gpt->mamba_head_dim = model.mamba_head_dim();
  gpt->mamba_num_groups = model.mamba_num_groups();
  const int64_t inner = 2 * gpt->hidden_size;
  if (model.has_mamba_num_heads()) {
    gpt->mamba_num_heads = model.mamba_num_heads();
  } else if (gpt->mamba_head_dim > 0 && inner % gpt->mamba_head_dim == 0) {
    gpt->mamba_num_heads = inner / gpt->mamba_head_dim;
  } else {
    problems->push_back({"model.mamba_head_dim", fmt::format("is {} and does not divide 2 * model.hidden_size = {}; choose a "
                                                             "divisor, or set model.mamba_num_heads",
                                                             gpt->mamba_head_dim, inner)});
  }
  if (model.has_mamba_conv_kernel()) gpt->mamba_conv_kernel = model.mamba_conv_kernel();
  if (model.has_mamba_conv_bias()) gpt->mamba_conv_bias = model.mamba_conv_bias();
  if (model.has_mamba_rms_norm()) gpt->mamba_rms_norm = model.mamba_rms_norm();
  gpt->mamba_norm_groups = model.mamba_norm_groups();
  gpt->mamba_norm_before_gate = model.mamba_norm_before_gate();
  gpt->mamba_dt_min = model.mamba_dt_min();
  gpt->mamba_dt_max = model.mamba_dt_max();
  gpt->mamba_multipliers = {model.mamba_multipliers().begin(), model.mamba_multipliers().end()};
}

void ReadPattern(const v1::ModelConfig& model, GptConfig* gpt, Problems* problems) {
  constexpr const char* kKey = "model.hybrid_layer_pattern";
  const std::string& pattern = model.hybrid_layer_pattern();
  if (std::cmp_not_equal(pattern.size(), gpt->num_layers)) {
    problems->push_back({kKey, fmt::format("has {} letters: one for each of the {} layers", pattern.size(), gpt->num_layers)});
    return;
  }
  std::vector<int64_t> experts;
  for (const char letter : pattern) {
    const auto* found =
        std::find_if(std::begin(kLetters), std::end(kLetters), [letter](const LayerLetter& l) { return l.letter == letter; });
    if (found == std::end(kLetters)) {
      problems->push_back({kKey, fmt::format("has the letter {}: M, *, -, E and P are known", letter)});
      return;
    }
    gpt->mixers.push_back(found->mixer);
    gpt->mlp_layer_freq.push_back(found->mlp ? 1 : 0);
    experts.push_back(found->experts ? 1 : 0);
  }
  const bool any_experts = std::find(experts.begin(), experts.end(), 1) != experts.end();
  if (any_experts != (gpt->num_moe_experts > 0)) {
    problems->push_back({kKey, any_experts ? "has the letter E, which needs model.num_moe_experts"
                                           : "has no letter E, and model.num_moe_experts is set"});
    return;
  }
  const auto& freq = model.moe_layer_freq();
  if (freq.size() > 1 || (freq.size() == 1 && freq[0] != 1)) {
    problems->push_back({"model.moe_layer_freq", "is set beside model.hybrid_layer_pattern, which says it: leave it out"});
  }
  gpt->moe_layer_freq = any_experts ? experts : std::vector<int64_t>();
}

}  // namespace

void ReadMixerParts(const v1::ModelConfig& model, GptConfig* gpt, Problems* problems) {
  ForEachMultiplier([&](auto field, auto has, auto get, auto) {
    if ((model.*has)()) gpt->*field = (model.*get)();
  });
  if (!model.has_hybrid_layer_pattern()) {
    if (model.is_hybrid_model()) problems->push_back({"model.hybrid_layer_pattern", "is missing with model.is_hybrid_model"});
    return;
  }
  if (!gpt->mixers.empty()) {
    problems->push_back({"model.linear_attention_freq", "is set beside model.hybrid_layer_pattern: keep one of them"});
    return;
  }
  ReadPattern(model, gpt, problems);
  if (AnyMamba(*gpt)) ReadMamba(model, gpt, problems);
}

void WriteMixerParts(const GptConfig& gpt, v1::ModelConfig* model) {
  ForEachMultiplier([&](auto field, auto, auto, auto set) {
    if (gpt.*field != 1) (model->*set)(gpt.*field);
  });
  if ((gpt.mixers.empty() && gpt.mlp_layer_freq.empty()) || CountLayers(gpt, HasGatedDelta) > 0) return;
  std::string pattern;
  for (int64_t layer = 0; layer < gpt.num_layers; ++layer) {
    const LayerLetter wanted{0, MixerOf(gpt, layer), HasMlp(gpt, layer), IsMoeLayer(gpt, layer)};
    const auto* found = std::find_if(std::begin(kLetters), std::end(kLetters), [&](const LayerLetter& l) {
      return l.mixer == wanted.mixer && l.mlp == wanted.mlp && l.experts == wanted.experts;
    });
    pattern += found == std::end(kLetters) ? '?' : found->letter;
  }
  model->set_is_hybrid_model(true);
  model->set_hybrid_layer_pattern(pattern);
  model->clear_moe_layer_freq();
  if (!AnyMamba(gpt)) return;
  const GptConfig none;
  model->set_mamba_state_dim(gpt.mamba_state_dim);
  model->set_mamba_head_dim(gpt.mamba_head_dim);
  model->set_mamba_num_groups(gpt.mamba_num_groups);
  model->set_mamba_num_heads(gpt.mamba_num_heads);
  if (gpt.mamba_conv_kernel != none.mamba_conv_kernel) model->set_mamba_conv_kernel(gpt.mamba_conv_kernel);
  if (!gpt.mamba_conv_bias) model->set_mamba_conv_bias(false);
  if (!gpt.mamba_rms_norm) model->set_mamba_rms_norm(false);
  if (gpt.mamba_norm_groups > 0) model->set_mamba_norm_groups(gpt.mamba_norm_groups);
  if (gpt.mamba_norm_before_gate) model->set_mamba_norm_before_gate(true);
  if (gpt.mamba_dt_min > 0) model->set_mamba_dt_min(gpt.mamba_dt_min);
  if (gpt.mamba_dt_max > 0) model->set_mamba_dt_max(gpt.mamba_dt_max);
  for (const double factor : gpt.mamba_multipliers) model->add_mamba_multipliers(factor);
}

}  // namespace mbridge
