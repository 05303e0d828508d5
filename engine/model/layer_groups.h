// Which layers are recomputed together, by model.recompute_method and model.recompute_num_layers (Megatron-LM,
// transformer_block.py: uniform and block).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core/torch_random.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Neighbouring layers. `again`: their activations, but for the first one's input, share memory with those of other such groups
// and are made again in backward.
struct LayerGroup {
  int64_t begin = 0, end = 0;
  bool again = false;
  PhiloxStream default_stream, model_parallel;  // Where the streams stood before the group.
};

// All layers, in order. Full recomputation makes groups; without it there is one, which is kept.
std::vector<LayerGroup> GroupsOf(const GptConfig& c);

}  // namespace mbridge
