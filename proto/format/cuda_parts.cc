#include "proto/format/cuda_parts.h"

#include <fmt/format.h>

#include <utility>

namespace mbridge {

std::string WithoutCudaOperator(const CudaNeeds& needs) {
  const std::pair<bool, const char*> parts[] = {
      {needs.gated_delta_net, "a gated delta net (model.linear_attention_freq)"},
      {needs.attention_output_gate, "an output gate of attention (model.attention_output_gate)"},
      {needs.mamba, "a Mamba-2 mixer (M or P in model.hybrid_layer_pattern)"},
      {needs.mlp_gate_multiplier, "a factor of the MLP's gate (model.mlp_gate_multiplier)"}};
  for (const auto& [needed, part] : parts) {
    if (needed) return fmt::format("{} has no CUDA operator in this version; --device cpu trains it", part);
  }
  constexpr int64_t kMostExperts = 512, kMostChosen = 32;  // Room of the router's kernels.
  const auto beyond = [](const char* key, int64_t value, int64_t most) {
    return fmt::format("model.{} is {}: the CUDA router takes up to {}; --device cpu trains more", key, value, most);
  };
  if (needs.moe_experts > kMostExperts) return beyond("num_moe_experts", needs.moe_experts, kMostExperts);
  if (needs.moe_experts > 0 && needs.moe_topk > kMostChosen) return beyond("moe_router_topk", needs.moe_topk, kMostChosen);
  return "";
}

}  // namespace mbridge
