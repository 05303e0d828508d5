#include "engine/bridge/families/common_tensors.h"

#include <string>

namespace mbridge {
namespace {

const std::string kOurs = "decoder.layers.{layer}.";
const std::string kTheirs = "model.layers.{layer}.";

void AddWeightAndBias(const std::string& ours, const std::vector<std::string>& theirs, RowOrder order,
                      std::vector<TensorRule>* to) {
  for (const char* kind : {".weight", ".bias"}) {
    TensorRule rule{.ours = kOurs + ours + kind, .theirs = {}, .order = order};
    for (const std::string& name : theirs) rule.theirs.push_back(kTheirs + name + kind);
    to->push_back(std::move(rule));
  }
}

}  // namespace

std::vector<TensorRule> EmbeddingAndHeadTensors() {
  return {{.ours = "embedding.word_embeddings.weight", .theirs = {"model.embed_tokens.weight"}, .vocabulary = true},
          {.ours = "decoder.final_layernorm.weight", .theirs = {"model.norm.weight"}},
          {.ours = "decoder.final_layernorm.bias", .theirs = {"model.norm.bias"}},
          {.ours = "output_layer.weight", .theirs = {"lm_head.weight"}, .vocabulary = true}};
}

std::vector<TensorRule> PreNormTensors() {
  std::vector<TensorRule> rules;
  AddWeightAndBias("input_layernorm", {"input_layernorm"}, nullptr, &rules);
  AddWeightAndBias("pre_mlp_layernorm", {"post_attention_layernorm"}, nullptr, &rules);
  return rules;
}

std::vector<TensorRule> PostNormTensors(const std::string& attention, const std::string& mlp) {
  std::vector<TensorRule> rules;
  AddWeightAndBias("self_attention.linear_proj.post_layernorm", {attention}, nullptr, &rules);
  AddWeightAndBias("mlp.linear_fc2.post_layernorm", {mlp}, nullptr, &rules);
  return rules;
}

std::vector<TensorRule> AttentionTensors() {
  std::vector<TensorRule> rules;
  AddWeightAndBias("self_attention.linear_qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, QkvRows, &rules);
  AddWeightAndBias("self_attention.linear_proj", {"self_attn.o_proj"}, nullptr, &rules);
  AddWeightAndBias("self_attention.q_layernorm", {"self_attn.q_norm"}, nullptr, &rules);
  AddWeightAndBias("self_attention.k_layernorm", {"self_attn.k_norm"}, nullptr, &rules);
  return rules;
}

std::vector<TensorRule> GatedMlpTensors() {
  std::vector<TensorRule> rules;
  AddWeightAndBias("mlp.linear_fc1", {"mlp.gate_proj", "mlp.up_proj"}, nullptr, &rules);
  AddWeightAndBias("mlp.linear_fc2", {"mlp.down_proj"}, nullptr, &rules);
  return rules;
}

std::vector<TensorRule> JoinTensors(std::initializer_list<std::vector<TensorRule>> lists) {
  std::vector<TensorRule> all;
  for (const std::vector<TensorRule>& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace mbridge
