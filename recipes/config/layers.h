// What the layers of a model are made of, from its keys. Pure functions.
#pragma once

#include <cstdint>

#include "mbridge/v1/config.pb.h"

namespace mbridge::recipes {

struct LayerParts {
  bool attention = true;
  bool mamba = false;
  bool delta = false;  // A gated delta net, in place of attention.
  bool mlp = true;     // Or experts.
  bool moe = false;    // Experts.
  bool mixer() const { return attention || mamba || delta; }
};

// Of a layer, counted from 0.
LayerParts PartsOf(const v1::ModelConfig& model, int64_t layer);

// Layers that have each part.
struct LayerCounts {
  int64_t attention = 0, mamba = 0, delta = 0, dense = 0, moe = 0;
  int64_t mixers = 0;  // With any of the first three.
};
LayerCounts CountLayers(const v1::ModelConfig& model);

// Sizes of a Mamba-2 mixer.
int64_t MambaHeads(const v1::ModelConfig& model);
int64_t MambaInnerWidth(const v1::ModelConfig& model);        // Of x and z.
int64_t MambaConvolutionWidth(const v1::ModelConfig& model);  // Of x, B and C together.

// Sizes of a gated delta net.
int64_t DeltaKeyWidth(const v1::ModelConfig& model);
int64_t DeltaValueWidth(const v1::ModelConfig& model);
int64_t DeltaProjectionWidth(const v1::ModelConfig& model);  // Rows of its in_proj.

}  // namespace mbridge::recipes
