#include "engine/model/layer_groups.h"

#include <algorithm>

namespace mbridge {

std::vector<LayerGroup> GroupsOf(const GptConfig& c) {
  const bool uniform = c.recompute == Recompute::kUniform, block = c.recompute == Recompute::kBlock;
  const int64_t recomputed = uniform ? c.num_layers : block ? std::min(c.recompute_num_layers, c.num_layers) : 0;
  std::vector<LayerGroup> groups;
  for (int64_t begin = 0; begin < c.num_layers;) {
    const bool again = begin < recomputed;
    const int64_t length = !again ? c.num_layers : uniform ? c.recompute_num_layers : 1;
    groups.push_back({begin, std::min(begin + length, c.num_layers), again, {}, {}});
    begin += length;
  }
  return groups;
}

}  // namespace mbridge
