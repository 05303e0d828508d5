#include "recipes/config/estimate.h"

#include <algorithm>

namespace mbridge::recipes {
namespace {

struct LayerKinds {
  int64_t dense = 0;
  int64_t moe = 0;
};

LayerKinds CountLayers(const v1::ModelConfig& model) {
  LayerKinds kinds;
  for (int64_t i = 0; i < std::min<int64_t>(model.num_layers(), 1 << 20); ++i) {
    bool moe = model.num_moe_experts() > 0;
    if (moe && model.moe_layer_freq_size() == model.num_layers()) {
      moe = model.moe_layer_freq(static_cast<int>(i)) != 0;
    } else if (moe && model.moe_layer_freq_size() == 1 && model.moe_layer_freq(0) > 0) {
      moe = i % model.moe_layer_freq(0) == 0;
    }
    ++(moe ? kinds.moe : kinds.dense);
  }
  return kinds;
}

int64_t GateFactor(const v1::ModelConfig& model) { return model.gated_linear_unit() ? 3 : 2; }
int64_t MoeWidth(const v1::ModelConfig& model) {
  return model.has_moe_ffn_hidden_size() ? model.moe_ffn_hidden_size() : model.ffn_hidden_size();
}
int64_t TopK(const v1::ModelConfig& model) { return model.has_moe_router_topk() ? model.moe_router_topk() : 2; }

// Weights of the matrix products of attention.
int64_t AttentionWeights(const v1::ModelConfig& m) {
  const int64_t h = m.hidden_size(), heads = m.num_attention_heads();
  if (m.multi_latent_attention()) {
    const int64_t query = m.qk_head_dim() + m.qk_pos_emb_head_dim();
    const int64_t q = m.has_q_lora_rank() ? m.q_lora_rank() * (h + heads * query + 1) : h * heads * query;
    return q + m.kv_lora_rank() * (h + heads * (m.qk_head_dim() + m.v_head_dim()) + 1) + h * m.qk_pos_emb_head_dim() +
           heads * m.v_head_dim() * h;
  }
  const int64_t q = m.kv_channels() * heads, kv = m.kv_channels() * m.num_query_groups();
  return h * (q + 2 * kv) + q * h;
}

// Multiply-adds of the two products of core attention for one token, causal.
int64_t CoreAttention(const v1::ModelConfig& m) {
  const int64_t s = m.seq_length(), heads = m.num_attention_heads();
  if (m.multi_latent_attention())
    return s * heads * (m.qk_head_dim() + m.qk_pos_emb_head_dim()) / 2 + s * heads * m.v_head_dim() / 2;
  return m.kv_channels() * heads * s;
}

int64_t NormWeights(const v1::ModelConfig& m) { return m.hidden_size() * (m.normalization() == "RMSNorm" ? 1 : 2); }

int64_t AttentionExtras(const v1::ModelConfig& m) {
  const int64_t q = m.kv_channels() * m.num_attention_heads(), kv = m.kv_channels() * m.num_query_groups();
  int64_t extras = ((m.has_pre_layernorm() && !m.pre_layernorm() ? 0 : 2) + (m.post_layernorm() ? 2 : 0)) * NormWeights(m);
  if (m.add_bias_linear() || m.add_qkv_bias()) extras += q + 2 * kv;
  if (m.add_bias_linear()) extras += m.hidden_size();
  if (m.qk_layernorm() && !m.multi_latent_attention()) extras += m.qk_norm_over_projection() ? q + kv : 2 * m.kv_channels();
  return extras;
}

int64_t MlpWeights(const v1::ModelConfig& m, int64_t width) {
  const int64_t products = m.hidden_size() * width * GateFactor(m);
  return products + (m.add_bias_linear() ? width * (GateFactor(m) - 1) + m.hidden_size() : 0);
}

int64_t EmbeddingWeights(const v1::ModelConfig& m) {
  const int64_t words = m.vocab_size() * m.hidden_size();
  const int64_t positions = m.position_embedding_type() == "learned_absolute" ? m.seq_length() * m.hidden_size() : 0;
  return words * (m.share_embeddings_and_output_weights() ? 1 : 2) + positions;
}

// Parameters of one rank: layers over TP and PP, experts over EP and ETP, embeddings over TP (on the fuller of the end stages).
int64_t ParametersOfRank(const v1::ModelConfig& m) {
  const auto ways = [](int64_t n) { return std::max<int64_t>(1, n); };
  const int64_t tp = ways(m.tensor_model_parallel_size()), pp = ways(m.pipeline_model_parallel_size());
  const LayerKinds kinds = CountLayers(m);
  const int64_t experts = kinds.moe * m.num_moe_experts() * MlpWeights(m, MoeWidth(m));
  const int64_t layers = CountParameters(m) - EmbeddingWeights(m) - experts - NormWeights(m);
  const int64_t ep = ways(m.expert_model_parallel_size());
  const int64_t etp = m.has_expert_tensor_parallel_size() || ep > 1 ? ways(m.expert_tensor_parallel_size()) : tp;
  return layers / (tp * pp) + experts / (ep * etp * pp) + EmbeddingWeights(m) / tp + NormWeights(m);
}

int64_t BytesOfType(const v1::ModelConfig& m) { return m.bf16() || m.fp16() ? 2 : 4; }

// Elements of queries, keys, values, context, and latent vectors that a layer keeps for each token.
int64_t HeadWidths(const v1::ModelConfig& m) {
  const int64_t heads = m.num_attention_heads();
  if (m.multi_latent_attention()) {
    return heads * (2 * (m.qk_head_dim() + m.qk_pos_emb_head_dim()) + 2 * m.v_head_dim()) +
           2 * (m.kv_lora_rank() + m.q_lora_rank());
  }
  return 2 * m.kv_channels() * (heads + m.num_query_groups());
}

int64_t ActivationBytes(const v1::ConfigContainer& config) {
  const v1::ModelConfig& m = config.model();
  const auto ways = [](int64_t n) { return std::max<int64_t>(1, n); };
  const int64_t tokens = m.seq_length() * config.train().micro_batch_size() / ways(m.context_parallel_size());
  const int64_t h = m.hidden_size(), e = BytesOfType(m), layers = m.num_layers();
  // Of a layer and token: what all tensor-parallel ranks hold unless the sequence is split too, and what is split over them.
  const int64_t stream = e * 4 * h + (m.hidden_dropout() > 0 ? 2 * h : 0);
  const int64_t attention =
      e * HeadWidths(m) + m.num_attention_heads() * m.seq_length() * (e + (m.attention_dropout() > 0 ? 1 : 0));
  const LayerKinds kinds = CountLayers(m);
  const int64_t routed = MoeWidth(m) * TopK(m) + m.moe_shared_expert_intermediate_size();
  const int64_t router = 8 * m.num_moe_experts() + 16 * TopK(m);  // Logits, scores and choice.
  const int64_t mlps = kinds.dense * e * m.ffn_hidden_size() * GateFactor(m) + kinds.moe * (e * routed * GateFactor(m) + router);
  const int64_t pp = ways(m.pipeline_model_parallel_size()), tp = ways(m.tensor_model_parallel_size());
  return tokens * ((layers * attention + mlps) / pp / tp + (layers * stream / pp + 2 * e * h) / (m.sequence_parallel() ? tp : 1));
}

}  // namespace

int64_t CountParameters(const v1::ModelConfig& m) {
  const LayerKinds kinds = CountLayers(m);
  int64_t count = EmbeddingWeights(m) + NormWeights(m);
  count += m.num_layers() * (AttentionWeights(m) + AttentionExtras(m));
  count += kinds.dense * MlpWeights(m, m.ffn_hidden_size());
  const int64_t shared = m.has_moe_shared_expert_intermediate_size() ? MlpWeights(m, m.moe_shared_expert_intermediate_size()) : 0;
  count += kinds.moe * (m.num_moe_experts() * (MlpWeights(m, MoeWidth(m)) + m.hidden_size()) + shared);
  return count;
}

int64_t FlopsPerToken(const v1::ModelConfig& m) {
  const LayerKinds kinds = CountLayers(m);
  const int64_t h = m.hidden_size(), layers = m.num_layers();
  const int64_t widths =
      m.ffn_hidden_size() * kinds.dense + MoeWidth(m) * TopK(m) * kinds.moe + m.moe_shared_expert_intermediate_size() * kinds.moe;
  return 6 * (layers * (AttentionWeights(m) + CoreAttention(m)) + h * GateFactor(m) * widths + h * m.vocab_size());
}

v1::MemoryEstimate EstimateMemory(const v1::ConfigContainer& config, int data_parallel) {
  const v1::ModelConfig& m = config.model();
  const int64_t parameters = ParametersOfRank(m), type = BytesOfType(m);
  const bool aware = config.optimizer().use_precision_aware_optimizer();
  const int64_t moments = config.optimizer().exp_avg_dtype() == "bf16" ? 4 : 8;
  const int64_t masters = type == 4 ? 0 : (aware && m.bf16() && config.optimizer().store_param_remainders() ? 2 : 4);
  const int64_t optimizer_bytes = moments + masters;
  const int64_t tp = std::max<int64_t>(1, m.tensor_model_parallel_size());
  v1::MemoryEstimate estimate;
  estimate.set_parameters(CountParameters(m));
  estimate.set_weight_bytes(parameters * type);
  estimate.set_gradient_bytes(parameters * 4);
  estimate.set_optimizer_bytes(parameters * optimizer_bytes /
                               (config.ddp().use_distributed_optimizer() ? std::max(1, data_parallel) : 1));
  estimate.set_activation_bytes(ActivationBytes(config));
  estimate.set_workspace_bytes(m.seq_length() * config.train().micro_batch_size() * m.vocab_size() * (type + 4) / tp);
  estimate.set_checkpoint_bytes(CountParameters(m) * (type + (config.checkpoint().save_optim() ? optimizer_bytes : 0)));
  return estimate;
}

}  // namespace mbridge::recipes
