// What the layers of a model are made of, from its keys. Pure functions.
#pragma once

#include <cstdint>

#include "mbridge/v1/config.pb.h"

namespace mbridge::recipes {

struct LayerParts {
  bool attention = true;
  bool mamba = false;
  bool mlp = true;   // Or experts.
  bool moe = false;  // Experts.
};

// Of a layer, counted from 0.
LayerParts PartsOf(const v1::ModelConfig& model, int64_t layer);

// Layers that have each part.
struct LayerCounts {
  int64_t attention = 0, mamba = 0, dense = 0, moe = 0;
  int64_t mixers = 0;  // With attention, Mamba-2 or both.
};
LayerCounts CountLayers(const v1::ModelConfig& model);

// Sizes of a Mamba-2 mixer.
int64_t MambaHeads(const v1::ModelConfig& model);
int64_t MambaInnerWidth(const v1::ModelConfig& model);        // Of x and z.
int64_t MambaConvolutionWidth(const v1::ModelConfig& model);  // Of x, B and C together.

}  // namespace mbridge::recipes
