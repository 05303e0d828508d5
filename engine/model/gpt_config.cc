#include "engine/model/gpt_config.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "engine/core/error.h"
#include "engine/model/gated_delta_net.h"
#include "engine/model/mamba.h"
#include "engine/model/mla.h"
#include "engine/model/moe.h"
#include "engine/model/rotary_tables.h"
#include "proto/format/cuda_parts.h"

namespace mbridge {
namespace {

void RequirePositive(std::string_view field, int64_t value) {
  if (value > 0) return;
  throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model.{} is {}: at least 1", field, value));
}

void RequireProbability(std::string_view field, double value) {
  if (value >= 0.0 && value < 1.0) return;
  throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model.{} is {}: at least 0 and below 1", field, value));
}

void RequireMultiple(std::string_view field, int64_t value, std::string_view of, int64_t divisor) {
  if (value % divisor == 0) return;
  throw EngineError(v1::REASON_INVALID_CONFIG,
                    fmt::format("model.{} is {}: must be a multiple of model.{} = {}", field, value, of, divisor));
}

void RequireAbove(std::string_view field, double value, double bound) {
  if (value > bound) return;
  throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model.{} is {}: above {}", field, value, bound));
}

void ValidateRotary(const GptConfig& config) {
  RequireAbove("rotary_base", config.rotary_base, 0.0);
  const int64_t width = RotaryWidth(config);
  if (width < 2 || width > config.kv_channels || width % 2 != 0) {
    throw EngineError(
        v1::REASON_INVALID_CONFIG,
        fmt::format(
            "model.rotary_percent is {}: it must turn an even number of the {} elements of a head (model.kv_channels), not {}",
            config.rotary_percent, config.kv_channels, width));
  }
  const bool long_rope = !config.long_rope_short_factors.empty() || !config.long_rope_long_factors.empty();
  if (config.rope_scaling + (config.rope_dynamic_factor > 0) + (config.yarn_rotary_scaling_factor > 0) + long_rope > 1) {
    throw EngineError(v1::REASON_INVALID_CONFIG,
                      "model.rope_scaling, model.rope_dynamic_factor, YaRN and LongRoPE: only one of them");
  }
  for (const auto* factors : {&config.long_rope_short_factors, &config.long_rope_long_factors}) {
    if (!long_rope || std::cmp_equal(factors->size(), width / 2)) continue;
    throw EngineError(v1::REASON_INVALID_CONFIG,
                      fmt::format("LongRoPE has {} factors: one for each of the {} turned pairs", factors->size(), width / 2));
  }
  RequireAbove("rope_original_length", config.rope_original_length, 1.0);
  RequireAbove("rope_attention_factor", config.rope_attention_factor, 0.0);
  if (!config.rope_scaling) return;
  RequireAbove("rope_scaling_factor", config.rope_scaling_factor, 0.0);
  RequireAbove("rope_high_freq_factor", config.rope_high_freq_factor, config.rope_low_freq_factor);
}

// One 0 or 1 for each layer, or nothing.
void ValidateLayerPattern(std::string_view field, const std::vector<int64_t>& pattern, int64_t num_layers) {
  const bool flags = std::all_of(pattern.begin(), pattern.end(), [](int64_t flag) { return flag == 0 || flag == 1; });
  if (flags && (pattern.empty() || std::cmp_equal(pattern.size(), num_layers))) return;
  throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model.{} has {} entries: a 0 or 1 for each of the {} layers", field,
                                                           pattern.size(), num_layers));
}

void ValidateScales(const GptConfig& config) {
  const auto at_least_zero = [](std::string_view field, double value) {
    if (value < 0) throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model.{} is {}: at least 0", field, value));
  };
  at_least_zero("softmax_scale", config.softmax_scale);
  at_least_zero("attn_logit_softcapping", config.attn_logit_softcapping);
  at_least_zero("final_logit_softcapping", config.final_logit_softcapping);
  at_least_zero("rotary_base_local", config.rotary_base_local);
  RequireAbove("embedding_multiplier", config.embedding_multiplier, 0.0);
  RequireAbove("residual_multiplier", config.residual_multiplier, 0.0);
  RequireAbove("logits_scaling", config.logits_scaling, 0.0);
}

[[noreturn]] void Unsupported(std::string_view what) {
  throw EngineError(v1::REASON_UNSUPPORTED_MODEL, fmt::format("this engine does not build {} yet", what));
}

void ValidateMultipliers(const GptConfig& config) {
  for (const auto& [field, value] : {std::pair{"attention_in_multiplier", config.attention_in_multiplier},
                                     {"attention_out_multiplier", config.attention_out_multiplier},
                                     {"key_multiplier", config.key_multiplier},
                                     {"mlp_gate_multiplier", config.mlp_gate_multiplier},
                                     {"mlp_out_multiplier", config.mlp_out_multiplier}}) {
    RequireAbove(field, value, 0.0);
  }
  const bool attention =
      config.attention_in_multiplier != 1 || config.attention_out_multiplier != 1 || config.key_multiplier != 1;
  const bool mlp = config.mlp_gate_multiplier != 1 || config.mlp_out_multiplier != 1;
  const bool bias = config.add_bias_linear || config.add_qkv_bias || config.add_attention_output_bias || config.add_mlp_bias;
  if ((attention || mlp) && (bias || config.post_layernorm)) Unsupported("multipliers with biases or model.post_layernorm");
  if (attention && (config.qk_layernorm || config.multi_latent_attention))
    Unsupported("multipliers of attention with model.qk_layernorm or model.multi_latent_attention");
  if (config.mlp_gate_multiplier != 1 && !IsGated(config.activation))
    Unsupported("model.mlp_gate_multiplier without model.gated_linear_unit");
  if (mlp && CountLayers(config, IsMoeLayer) > 0) Unsupported("multipliers of the MLP with experts");
}

// Each layer has something that it does.
void ValidateMixers(const GptConfig& config) {
  ValidateLayerPattern("mlp_layer_freq", config.mlp_layer_freq, config.num_layers);
  if (!config.mixers.empty() && std::cmp_not_equal(config.mixers.size(), config.num_layers)) {
    throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model.hybrid_layer_pattern says {} layers: model.num_layers is {}",
                                                             config.mixers.size(), config.num_layers));
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (MixerOf(config, layer) != MixerKind::kNone || HasMlp(config, layer)) continue;
    throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("layer {} has neither a mixer nor an MLP", layer));
  }
  if (CountLayers(config, HasMamba) > 0) ValidateMamba(config);
  if (CountLayers(config, HasGatedDelta) > 0) ValidateGatedDelta(config);
  ValidateMultipliers(config);
}

}  // namespace

int64_t AttentionWindowOf(const GptConfig& config, int64_t layer) {
  const auto& pattern = config.window_attn_skip_freq;
  return pattern.empty() || pattern[static_cast<size_t>(layer)] != 0 ? config.attention_window : 0;
}

bool HasRope(const GptConfig& config, int64_t layer) {
  if (config.position_embedding != PositionKind::kRope) return false;
  return config.no_rope_freq.empty() || config.no_rope_freq[static_cast<size_t>(layer)] == 0;
}

MixerKind MixerOf(const GptConfig& config, int64_t layer) {
  return std::cmp_less(layer, config.mixers.size()) ? config.mixers[static_cast<size_t>(layer)] : MixerKind::kAttention;
}

bool HasAttention(const GptConfig& config, int64_t layer) {
  const MixerKind mixer = MixerOf(config, layer);
  return mixer == MixerKind::kAttention || mixer == MixerKind::kAttentionAndMamba2;
}

bool HasMamba(const GptConfig& config, int64_t layer) {
  const MixerKind mixer = MixerOf(config, layer);
  return mixer == MixerKind::kMamba2 || mixer == MixerKind::kAttentionAndMamba2;
}

bool HasGatedDelta(const GptConfig& config, int64_t layer) { return MixerOf(config, layer) == MixerKind::kGatedDeltaNet; }

bool HasMlp(const GptConfig& config, int64_t layer) {
  const auto& pattern = config.mlp_layer_freq;
  return std::cmp_greater_equal(layer, pattern.size()) || pattern[static_cast<size_t>(layer)] != 0;
}

bool IsMoeLayer(const GptConfig& config, int64_t layer) {
  const auto& pattern = config.moe_layer_freq;
  return HasMlp(config, layer) && config.num_moe_experts > 0 && (pattern.empty() || pattern[static_cast<size_t>(layer)] != 0);
}

int64_t CountLayers(const GptConfig& config, bool (*has)(const GptConfig&, int64_t)) {
  int64_t count = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) count += has(config, layer) ? 1 : 0;
  return count;
}

bool IsGated(ActivationKind kind) {
  return kind == ActivationKind::kSwiGlu || kind == ActivationKind::kGeglu || kind == ActivationKind::kGegluTanh ||
         kind == ActivationKind::kQuickGeglu;
}

bool IsLowPrecisionLayer(const GptConfig& config, int64_t layer) {
  const LowPrecisionOptions& options = config.low_precision;
  return options.enabled() && layer >= options.first_layers_apart && layer < config.num_layers - options.last_layers_apart;
}

int64_t QkvWidth(const GptConfig& config) {
  const int64_t queries = config.attention_output_gate ? 2 * config.num_attention_heads : config.num_attention_heads;
  return (queries + 2 * config.num_query_groups) * config.kv_channels;
}

int64_t ContextWidth(const GptConfig& config) {
  return config.num_attention_heads * (config.multi_latent_attention ? config.v_head_dim : config.kv_channels);
}

int64_t Fc1Width(const GptConfig& config) {
  return IsGated(config.activation) ? 2 * config.ffn_hidden_size : config.ffn_hidden_size;
}

double EmbeddingInitStd(const GptConfig& config) {
  return config.embedding_init_std > 0 ? config.embedding_init_std : config.init_method_std;
}

double OutputInitStd(const GptConfig& config) {
  if (config.output_init_std > 0) return config.output_init_std;
  return config.init_method_std / std::sqrt(2.0 * static_cast<double>(config.num_layers));
}

void ValidateGptConfig(const GptConfig& config) {
  RequirePositive("num_layers", config.num_layers);
  RequirePositive("hidden_size", config.hidden_size);
  ValidateMixers(config);
  if (CountLayers(config, HasAttention) > 0) {
    RequirePositive("num_attention_heads", config.num_attention_heads);
    RequirePositive("num_query_groups", config.num_query_groups);
    RequirePositive("kv_channels", config.kv_channels);
    RequireMultiple("num_attention_heads", config.num_attention_heads, "num_query_groups", config.num_query_groups);
  }
  ValidateLayerPattern("moe_layer_freq", config.moe_layer_freq, config.num_layers);
  const int64_t moe_layers = CountLayers(config, IsMoeLayer);
  ValidateMoe(config);
  ValidateMla(config);
  const bool gate_alone = !config.add_bias_linear && !config.add_qkv_bias && !config.multi_latent_attention;
  if (config.attention_output_gate && !gate_alone)
    Unsupported("an output gate of attention with biases or multi-latent attention");
  if (config.attention_output_gate && CountLayers(config, HasMamba) > 0)
    Unsupported("an output gate of attention beside Mamba-2 mixers");
  if (CountLayers(config, HasMlp) > moe_layers) RequirePositive("ffn_hidden_size", config.ffn_hidden_size);
  RequirePositive("seq_length", config.seq_length);
  RequirePositive("vocab_size (padded)", config.padded_vocab_size);
  RequireProbability("hidden_dropout", config.hidden_dropout);
  RequireProbability("attention_dropout", config.attention_dropout);
  if (config.position_embedding == PositionKind::kLearnedAbsolute && config.max_position_embeddings < config.seq_length) {
    throw EngineError(v1::REASON_INVALID_CONFIG,
                      fmt::format("model.max_position_embeddings is {}: at least model.seq_length = {}",
                                  config.max_position_embeddings, config.seq_length));
  }
  if (config.recompute == Recompute::kUniform || config.recompute == Recompute::kBlock)
    RequirePositive("recompute_num_layers", config.recompute_num_layers);
  if (config.dtype != DType::kBF16 && config.dtype != DType::kF16 && config.dtype != DType::kF32) {
    throw EngineError(v1::REASON_INVALID_CONFIG, fmt::format("model dtype {}: BF16, F16 or F32", NameOf(config.dtype)));
  }
  if (config.attention_window < 0) RequirePositive("window_size", config.attention_window);
  if (config.position_embedding == PositionKind::kRope && CountLayers(config, HasAttention) > 0) ValidateRotary(config);
  ValidateLayerPattern("window_attn_skip_freq", config.window_attn_skip_freq, config.num_layers);
  ValidateLayerPattern("no_rope_freq", config.no_rope_freq, config.num_layers);
  ValidateScales(config);
  if (config.low_precision.enabled() && config.dtype == DType::kF32) {
    throw EngineError(v1::REASON_INVALID_CONFIG, "model.fp8 or model.fp4 with parameters in F32: BF16 or F16");
  }
  if (config.activation == ActivationKind::kQuickGeglu && CountLayers(config, HasMlp) > moe_layers)
    Unsupported("plain MLPs with a gated quick GELU");
  if (config.qk_layernorm && config.normalization != NormKind::kRmsNorm)
    Unsupported("query-key norms of another kind than RMSNorm");
}

void RequireCudaParts(const GptConfig& c) {
  const std::string missing = WithoutCudaOperator({.gated_delta_net = CountLayers(c, HasGatedDelta) > 0,
                                                   .attention_output_gate = c.attention_output_gate,
                                                   .mamba = CountLayers(c, HasMamba) > 0,
                                                   .mlp_gate_multiplier = c.mlp_gate_multiplier != 1,
                                                   .moe_experts = c.num_moe_experts,
                                                   .moe_topk = c.moe_router_topk});
  if (!missing.empty()) throw EngineError(v1::REASON_UNSUPPORTED_MODEL, missing);
}

}  // namespace mbridge
