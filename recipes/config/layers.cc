#include "recipes/config/layers.h"

#include <algorithm>

namespace mbridge::recipes {
namespace {

bool IsMoe(const v1::ModelConfig& model, int64_t layer) {
  if (model.num_moe_experts() == 0) return false;
  if (model.moe_layer_freq_size() == model.num_layers()) return model.moe_layer_freq(static_cast<int>(layer)) != 0;
  if (model.moe_layer_freq_size() == 1 && model.moe_layer_freq(0) > 0) return layer % model.moe_layer_freq(0) == 0;
  return true;
}

// As engine/train/model_parts.cc reads the key: all but every N-th, or a flag for each layer.
bool IsDelta(const v1::ModelConfig& model, int64_t layer) {
  const auto& pattern = model.linear_attention_freq();
  if (pattern.size() == 1 && model.num_layers() != 1) return (layer + 1) % std::max<int64_t>(1, pattern[0]) != 0;
  return layer < pattern.size() && pattern[static_cast<int>(layer)] == 1;
}

}  // namespace

LayerParts PartsOf(const v1::ModelConfig& model, int64_t layer) {
  const std::string& pattern = model.hybrid_layer_pattern();
  if (!model.has_hybrid_layer_pattern() || layer >= static_cast<int64_t>(pattern.size())) {
    const bool delta = IsDelta(model, layer);
    return {.attention = !delta, .delta = delta, .moe = IsMoe(model, layer)};
  }
  const char letter = pattern[static_cast<size_t>(layer)];
  return {.attention = letter == '*' || letter == 'P',
          .mamba = letter == 'M' || letter == 'P',
          .mlp = letter == '-' || letter == 'E' || letter == 'P',
          .moe = letter == 'E'};
}

LayerCounts CountLayers(const v1::ModelConfig& model) {
  LayerCounts counts;
  for (int64_t i = 0; i < std::min<int64_t>(model.num_layers(), 1 << 20); ++i) {
    const LayerParts parts = PartsOf(model, i);
    counts.attention += parts.attention ? 1 : 0;
    counts.mamba += parts.mamba ? 1 : 0;
    counts.delta += parts.delta ? 1 : 0;
    counts.mixers += parts.mixer() ? 1 : 0;
    counts.moe += parts.moe ? 1 : 0;
    counts.dense += parts.mlp && !parts.moe ? 1 : 0;
  }
  return counts;
}

int64_t MambaHeads(const v1::ModelConfig& m) {
  return m.has_mamba_num_heads() ? m.mamba_num_heads() : 2 * m.hidden_size() / std::max<int64_t>(1, m.mamba_head_dim());
}
int64_t MambaInnerWidth(const v1::ModelConfig& m) { return MambaHeads(m) * m.mamba_head_dim(); }
int64_t MambaConvolutionWidth(const v1::ModelConfig& m) {
  return MambaInnerWidth(m) + 2 * m.mamba_num_groups() * m.mamba_state_dim();
}

int64_t DeltaKeyWidth(const v1::ModelConfig& m) { return m.linear_num_key_heads() * m.linear_key_head_dim(); }
int64_t DeltaValueWidth(const v1::ModelConfig& m) { return m.linear_num_value_heads() * m.linear_value_head_dim(); }
int64_t DeltaProjectionWidth(const v1::ModelConfig& m) {
  return 2 * DeltaKeyWidth(m) + 2 * DeltaValueWidth(m) + 2 * m.linear_num_value_heads();
}

}  // namespace mbridge::recipes
