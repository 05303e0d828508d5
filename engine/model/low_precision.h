// Which linear layers run on 8-bit or 4-bit operands, and how those are scaled.
#pragma once

#include <cstdint>

namespace mbridge {

enum class ScalingRecipe : uint8_t {
  kNone,
  kCurrent,    // One scale for a tensor, from its largest value.
  kDelayed,    // One scale for a tensor, from its largest values in earlier iterations.
  kBlockwise,  // E4M3 or E5M2, a scale for each 1 x 128 of activations and gradients and 128 x 128 of weights.
  kMxfp8,      // E4M3 or E5M2, a power of two for each 32 neighbours.
  kNvfp4,      // E2M1, an E4M3 scale for each 16 neighbours (weights: 16 x 16) and one for the tensor.
};

struct LowPrecisionOptions {
  bool operator==(const LowPrecisionOptions&) const = default;

  ScalingRecipe recipe = ScalingRecipe::kNone;
  bool wide_gradients = true;                // fp8 = hybrid: gradients in E5M2.
  int margin = 0;                            // Powers of two that tensor scales stay below the largest value.
  int64_t history_length = 1;                // Of delayed scaling, in iterations.
  bool most_recent = false;                  // It takes the last iteration's maxima, not the largest of the history.
  bool maxima_over_tensor_parallel = false;  // It takes them over the tensor-parallel group, not over all ranks.
  bool weight_gradients = true;              // Weight gradients too; otherwise their products stay in the model dtype.
  int64_t first_layers_apart = 0;            // Layers at both ends that stay in the model dtype.
  int64_t last_layers_apart = 0;

  bool enabled() const { return recipe != ScalingRecipe::kNone; }
  // Whether one scale serves a whole tensor, so that products run on 8-bit codes.
  bool per_tensor() const { return recipe == ScalingRecipe::kCurrent || recipe == ScalingRecipe::kDelayed; }
};

}  // namespace mbridge
