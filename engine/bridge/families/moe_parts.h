// Keys and lines of tensor tables that mixture-of-experts families share.
#pragma once

#include <string>
#include <vector>

#include "engine/bridge/config_keys.h"
#include "engine/bridge/tensor_map.h"

namespace mbridge {

// Where a family's checkpoints keep the parts of a layer of experts, after "model.layers.{layer}.".
struct ExpertNames {
  std::string block;  // "mlp".
  std::string gate = "gate_proj", up = "up_proj", down = "down_proj";
  std::string expert_bias = "gate.e_score_correction_bias";  // In the block.
  std::string shared = "shared_experts";
};
// Router, expert bias, experts (one tensor each in files, stacked in the running model) and shared experts.
std::vector<TensorRule> ExpertTensors(const ExpertNames& names);

// The number of experts under any of the names; the first is written unless the source has another.
ConfigKey ExpertCountKey(std::vector<std::string> names);
// Experts of a token, likewise.
ConfigKey ExpertsPerTokenKey(std::vector<std::string> names);
// intermediate_size is the width of an expert.
ConfigKey ExpertWidthKey();
// DeepSeek's words: n_routed_experts, n_shared_experts, num_experts_per_tok, moe_intermediate_size, routed_scaling_factor,
// first_k_dense_replace and what changes nothing.
std::vector<ConfigKey> DeepSeekExpertKeys();
// n_group, topk_group of a sigmoid router: a group counts by its two best experts.
ConfigKey SigmoidGroupsKey();
// first_k_dense_replace, moe_layer_freq: the first layers, and of the others all but every n-th, have no experts.
ConfigKey FirstDenseKey();
// Losses of the router in training and other hyperparameters that change nothing in what the model computes.
ConfigKey RouterFreeKeys();

// The pattern as GptConfig holds it: empty where every layer has experts.
std::vector<int64_t> CanonicalPattern(std::vector<int64_t> pattern);

}  // namespace mbridge
