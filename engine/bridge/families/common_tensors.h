// Lines of tensor tables that many families share.
#pragma once

#include <initializer_list>
#include <vector>

#include "engine/bridge/tensor_map.h"

namespace mbridge {

// model.embed_tokens, model.norm, lm_head.
std::vector<TensorRule> EmbeddingAndHeadTensors();
// model.layers.{layer}: input_layernorm and post_attention_layernorm (before the MLP).
std::vector<TensorRule> PreNormTensors();
// The norms of what attention and MLP add to the residual stream, by their names in model.layers.{layer}.
std::vector<TensorRule> PostNormTensors(const std::string& attention, const std::string& mlp);
// self_attn: q_proj, k_proj, v_proj, o_proj, q_norm, k_norm; weights and biases.
std::vector<TensorRule> AttentionTensors();
// mlp: gate_proj, up_proj, down_proj; weights and biases.
std::vector<TensorRule> GatedMlpTensors();

// `first` before the others: the first line that fits a name counts.
std::vector<TensorRule> JoinTensors(std::initializer_list<std::vector<TensorRule>> lists);

// Old files hold the frequencies of the rotation; they follow from config.json.
inline constexpr const char* kRotaryFrequencies = "model.layers.{layer}.self_attn.rotary_emb.inv_freq";

}  // namespace mbridge
