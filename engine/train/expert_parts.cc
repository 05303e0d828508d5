#include "engine/train/expert_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace mbridge {
namespace {

using Problems = std::vector<FieldViolation>;

void Refuse(const char* key, const std::string& value, const char* accepted, Problems* problems) {
  problems->push_back({key, fmt::format("is {}, which the engine does not have; accepted: {}", value, accepted)});
}

// One number N: every N-th layer from the first on; else a flag a layer.
std::vector<int64_t> LayerPattern(const v1::ModelConfig& model) {
  std::vector<int64_t> pattern;
  const auto& freq = model.moe_layer_freq();
  if (freq.size() == 1 && freq[0] > 1) {
    for (int64_t i = 0; i < model.num_layers(); ++i) pattern.push_back(i % freq[0] == 0);
  } else if (freq.size() > 1) {
    pattern.assign(freq.begin(), freq.end());
    if (std::find(pattern.begin(), pattern.end(), 0) == pattern.end() && std::cmp_equal(pattern.size(), model.num_layers()))
      pattern.clear();
  }
  return pattern;
}

void ReadRouter(const v1::ModelConfig& model, GptConfig* gpt, Problems* problems) {
  gpt->moe_router_topk = model.moe_router_topk();
  const std::string& score = model.moe_router_score_function();
  if (score == "sigmoid") {
    gpt->moe_router_score = RouterScore::kSigmoid;
  } else if (score == "softmax") {
    gpt->moe_router_score = model.moe_router_pre_softmax() ? RouterScore::kSoftmax : RouterScore::kSoftmaxOfChosen;
  } else {
    Refuse("model.moe_router_score_function", score, "softmax, sigmoid", problems);
  }
  gpt->moe_router_num_groups = model.moe_router_num_groups();
  gpt->moe_router_group_topk = model.moe_router_group_topk();
  gpt->moe_router_group_experts = model.moe_router_group_experts();
  if (model.has_moe_router_topk_scaling_factor()) gpt->moe_router_topk_scaling_factor = model.moe_router_topk_scaling_factor();
  gpt->moe_router_fp32 = model.moe_router_dtype() == "fp32";
  if (model.moe_router_dtype() == "fp64") Refuse("model.moe_router_dtype", "fp64", "fp32, or leave it out", problems);
  gpt->moe_router_enable_expert_bias = model.moe_router_enable_expert_bias();
  gpt->moe_router_bias_update_rate = model.moe_router_bias_update_rate();
  const std::string& balancing = model.moe_router_load_balancing_type();
  if (balancing == "none") {
    gpt->moe_load_balancing = LoadBalancing::kNone;
  } else if (balancing == "aux_loss") {
    gpt->moe_load_balancing = LoadBalancing::kBatch;
  } else if (balancing == "seq_aux_loss") {
    gpt->moe_load_balancing = LoadBalancing::kSequence;
  } else {
    Refuse("model.moe_router_load_balancing_type", balancing, "aux_loss, seq_aux_loss, none", problems);
  }
  gpt->moe_aux_loss_coeff = model.moe_aux_loss_coeff();
  gpt->moe_z_loss_coeff = model.moe_z_loss_coeff();
}

// Megatron-LM's factor of cosines and sines.
double YarnScale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

void ReadLatentAttention(const v1::ModelConfig& model, GptConfig* gpt, Problems* problems) {
  gpt->multi_latent_attention = true;
  gpt->q_lora_rank = model.q_lora_rank();
  gpt->kv_lora_rank = model.kv_lora_rank();
  gpt->qk_head_dim = model.qk_head_dim();
  gpt->qk_pos_emb_head_dim = model.qk_pos_emb_head_dim();
  gpt->v_head_dim = model.v_head_dim();
  gpt->kv_channels = gpt->qk_head_dim + gpt->qk_pos_emb_head_dim;
  gpt->num_query_groups = gpt->num_attention_heads;
  gpt->rotary_interleaved = true;  // Megatron-LM's multi-latent attention knows no other pairs.
  if (!model.qk_layernorm()) Refuse("model.qk_layernorm", "false with model.multi_latent_attention", "true", problems);
  gpt->qk_layernorm = false;  // That of the latent vectors is part of the attention.
  if (model.rope_type() != "yarn" || model.rotary_scaling_factor() <= 1) return;
  gpt->yarn_rotary_scaling_factor = model.rotary_scaling_factor();
  gpt->rope_original_length = static_cast<double>(model.original_max_position_embeddings());
  gpt->yarn_beta_fast = model.beta_fast();
  gpt->yarn_beta_slow = model.beta_slow();
  gpt->mscale_all_dim = model.mscale_all_dim();
  const double factor = model.rotary_scaling_factor();
  gpt->rope_attention_factor = model.has_rope_attention_factor()
                                   ? model.rope_attention_factor()
                                   : YarnScale(factor, model.mscale()) / YarnScale(factor, model.mscale_all_dim());
}

}  // namespace

void ReadExpertParts(const v1::ModelConfig& model, GptConfig* gpt, Problems* problems) {
  if (model.multi_latent_attention()) ReadLatentAttention(model, gpt, problems);
  gpt->attention_sinks = model.softmax_type() == "learnable";
  if (model.softmax_type() == "off-by-one") Refuse("model.softmax_type", "off-by-one", "vanilla, learnable", problems);
  gpt->glu_linear_offset = model.glu_linear_offset();
  gpt->activation_clamp = model.activation_func_clamp_value();
  gpt->num_moe_experts = model.num_moe_experts();
  if (gpt->num_moe_experts == 0) {
    if (gpt->glu_linear_offset != 0) Refuse("model.glu_linear_offset", "set without experts", "0", problems);
    if (gpt->activation_clamp != 0) Refuse("model.activation_func_clamp_value", "set without experts", "leave it out", problems);
    return;
  }
  gpt->moe_layer_freq = LayerPattern(model);
  gpt->moe_ffn_hidden_size = model.has_moe_ffn_hidden_size() ? model.moe_ffn_hidden_size() : gpt->ffn_hidden_size;
  gpt->moe_shared_expert_intermediate_size = model.moe_shared_expert_intermediate_size();
  gpt->moe_shared_expert_gate = model.moe_shared_expert_gate();
  ReadRouter(model, gpt, problems);
}

void WriteExpertParts(const GptConfig& gpt, v1::ModelConfig* model) {
  if (gpt.attention_sinks) model->set_softmax_type("learnable");
  if (gpt.glu_linear_offset != 0) model->set_glu_linear_offset(gpt.glu_linear_offset);
  if (gpt.activation_clamp != 0) model->set_activation_func_clamp_value(gpt.activation_clamp);
  if (gpt.multi_latent_attention) {
    model->set_multi_latent_attention(true);
    model->set_qk_layernorm(true);
    if (gpt.q_lora_rank > 0) {
      model->set_q_lora_rank(gpt.q_lora_rank);
    } else {
      model->clear_q_lora_rank();
    }
    model->set_kv_lora_rank(gpt.kv_lora_rank);
    model->set_qk_head_dim(gpt.qk_head_dim);
    model->set_qk_pos_emb_head_dim(gpt.qk_pos_emb_head_dim);
    model->set_v_head_dim(gpt.v_head_dim);
    model->set_rope_type(gpt.yarn_rotary_scaling_factor > 1 ? "yarn" : "rope");
    if (gpt.yarn_rotary_scaling_factor > 1) {
      model->set_rotary_scaling_factor(gpt.yarn_rotary_scaling_factor);
      model->set_original_max_position_embeddings(static_cast<int64_t>(gpt.rope_original_length));
      model->set_beta_fast(gpt.yarn_beta_fast);
      model->set_beta_slow(gpt.yarn_beta_slow);
      model->set_mscale_all_dim(gpt.mscale_all_dim);
      model->set_mscale(gpt.mscale_all_dim);
      // In place of the keys that YaRN has without multi-latent attention.
      model->set_position_embedding_type("rope");
      model->clear_yarn_rotary_scaling_factor();
      model->clear_yarn_original_max_position_embeddings();
      model->clear_yarn_beta_fast();
      model->clear_yarn_beta_slow();
      model->clear_yarn_correction_range_round_to_int();
      model->clear_rope_attention_factor();
      if (gpt.rope_attention_factor != 1) model->set_rope_attention_factor(gpt.rope_attention_factor);
    }
  }
  if (gpt.num_moe_experts == 0) return;
  model->set_num_moe_experts(gpt.num_moe_experts);
  model->clear_moe_layer_freq();
  for (const int64_t flag : gpt.moe_layer_freq) model->add_moe_layer_freq(flag);
  if (gpt.moe_layer_freq.empty()) model->add_moe_layer_freq(1);
  model->set_moe_ffn_hidden_size(gpt.moe_ffn_hidden_size);
  if (gpt.moe_shared_expert_intermediate_size > 0)
    model->set_moe_shared_expert_intermediate_size(gpt.moe_shared_expert_intermediate_size);
  model->set_moe_shared_expert_gate(gpt.moe_shared_expert_gate);
  model->set_moe_router_topk(gpt.moe_router_topk);
  model->set_moe_router_score_function(gpt.moe_router_score == RouterScore::kSigmoid ? "sigmoid" : "softmax");
  model->set_moe_router_pre_softmax(gpt.moe_router_score == RouterScore::kSoftmax);
  if (gpt.moe_router_num_groups > 0) {
    model->set_moe_router_num_groups(gpt.moe_router_num_groups);
    model->set_moe_router_group_topk(gpt.moe_router_group_topk);
    if (gpt.moe_router_group_experts > 0) model->set_moe_router_group_experts(gpt.moe_router_group_experts);
  }
  if (gpt.moe_router_topk_scaling_factor != 1.0) model->set_moe_router_topk_scaling_factor(gpt.moe_router_topk_scaling_factor);
  if (gpt.moe_router_fp32) model->set_moe_router_dtype("fp32");
  model->set_moe_router_enable_expert_bias(gpt.moe_router_enable_expert_bias);
  model->set_moe_router_bias_update_rate(gpt.moe_router_bias_update_rate);
  static constexpr const char* kBalancing[] = {"none", "aux_loss", "seq_aux_loss"};
  model->set_moe_router_load_balancing_type(kBalancing[static_cast<int>(gpt.moe_load_balancing)]);
  model->set_moe_aux_loss_coeff(gpt.moe_aux_loss_coeff);
  if (gpt.moe_z_loss_coeff != 0) model->set_moe_z_loss_coeff(gpt.moe_z_loss_coeff);
}

}  // namespace mbridge
