// Names of Megatron-Core's checkpoints for our parameters. torch_dist files hold the layers of a homogeneous model stacked in one
// tensor, experts too, and name norms as Transformer Engine does; a file of one rank has a tensor a layer. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mbridge {

// A place among the tensors of a stacked one: its index in a leading axis of `count`.
struct LeadingIndex {
  int64_t index = 0;
  int64_t count = 0;
};

struct StoredPart {
  std::string key;
  std::vector<LeadingIndex> lead;
};

// A parameter as one tensor, or as the two halves of its first axis (gate and linear half apart).
using StoredForm = std::vector<StoredPart>;

// All forms in which files hold parameter `ours`, the usual first.
std::vector<StoredForm> StoredForms(const std::string& ours, int64_t num_layers, int64_t num_experts);

// Names under which a torch_dist file holds what follows "decoder.layers.<n>." in our name: one, or two where the module of
// Transformer Engine and Megatron-LM's own name a norm differently. `expert`: -1, or the index that is an axis of the tensor.
struct WrittenName {
  std::string rest;
  int64_t expert = -1;
};
std::vector<WrittenName> WrittenNames(const std::string& rest, bool latent_attention, bool moe_layer);

// "decoder.layers.<n>.<rest>": n and the place of rest in the name; false for other names.
bool SplitLayerName(const std::string& name, int64_t* layer, size_t* rest);

}  // namespace mbridge
