#include "recipes/config/estimate.h"

#include <algorithm>

#include "recipes/config/layers.h"

namespace mbridge::recipes {
namespace {

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
  return h * ((m.attention_output_gate() ? 2 : 1) * q + 2 * kv) + q * h;
}

// Weights of the matrix products of a gated delta net.
int64_t DeltaWeights(const v1::ModelConfig& m) { return m.hidden_size() * (DeltaProjectionWidth(m) + DeltaValueWidth(m)); }

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
  int64_t extras = 0;
  if (m.add_bias_linear() || m.add_qkv_bias()) extras += q + 2 * kv;
  if (m.add_bias_linear() || m.add_attention_output_bias()) extras += m.hidden_size();
  if (m.qk_layernorm() && !m.multi_latent_attention()) extras += m.qk_norm_over_projection() ? q + kv : 2 * m.kv_channels();
  return extras;
}

// Norms of a block: of a mixer or an MLP.
int64_t BlockNorms(const v1::ModelConfig& m) {
  return ((m.has_pre_layernorm() && !m.pre_layernorm() ? 0 : 1) + (m.post_layernorm() ? 1 : 0)) * NormWeights(m);
}

// Weights of the matrix products of a Mamba-2 mixer.
int64_t MambaWeights(const v1::ModelConfig& m) {
  return m.hidden_size() * (2 * MambaInnerWidth(m) + MambaConvolutionWidth(m) + MambaHeads(m));
}

int64_t MambaExtras(const v1::ModelConfig& m) {
  const int64_t kernel = m.has_mamba_conv_kernel() ? m.mamba_conv_kernel() : 4;
  const bool conv_bias = !m.has_mamba_conv_bias() || m.mamba_conv_bias(), norm = !m.has_mamba_rms_norm() || m.mamba_rms_norm();
  int64_t extras =
      MambaConvolutionWidth(m) * (kernel + (conv_bias ? 1 : 0)) + 3 * MambaHeads(m) + (norm ? MambaInnerWidth(m) : 0);
  if (m.add_bias_linear()) extras += MambaInnerWidth(m) + MambaConvolutionWidth(m) + MambaHeads(m) + m.hidden_size();
  return extras;
}

// Parameters of a layer with a gated delta net, but for its MLP.
int64_t DeltaParameters(const v1::ModelConfig& m) {
  return DeltaWeights(m) + (2 * DeltaKeyWidth(m) + DeltaValueWidth(m)) * m.linear_conv_kernel_dim() +
         2 * m.linear_num_value_heads() + m.linear_value_head_dim();
}

int64_t MlpWeights(const v1::ModelConfig& m, int64_t width) {
  const int64_t products = m.hidden_size() * width * GateFactor(m);
  return products + (m.add_bias_linear() ? width * (GateFactor(m) - 1) + m.hidden_size() : 0);
}

int64_t DenseMlpWeights(const v1::ModelConfig& m) {
  const int64_t width = m.ffn_hidden_size();
  const bool alone = m.add_mlp_bias() && !m.add_bias_linear();
  return MlpWeights(m, width) + (alone ? width * (GateFactor(m) - 1) + m.hidden_size() : 0);
}

int64_t EmbeddingWeights(const v1::ModelConfig& m) {
  const int64_t words = m.vocab_size() * m.hidden_size();
  const int64_t positions = m.position_embedding_type() == "learned_absolute" ? m.seq_length() * m.hidden_size() : 0;
  return words * (m.share_embeddings_and_output_weights() ? 1 : 2) + positions;
}

}  // namespace

int64_t CountParameters(const v1::ModelConfig& m) {
  const LayerCounts kinds = CountLayers(m);
  int64_t count = EmbeddingWeights(m) + NormWeights(m);
  count += kinds.attention * (AttentionWeights(m) + AttentionExtras(m)) + kinds.delta * DeltaParameters(m);
  count += kinds.mamba * (MambaWeights(m) + MambaExtras(m)) + (kinds.mixers + kinds.dense + kinds.moe) * BlockNorms(m);
  count += kinds.dense * DenseMlpWeights(m);
  const int64_t shared = m.has_moe_shared_expert_intermediate_size() ? MlpWeights(m, m.moe_shared_expert_intermediate_size()) : 0;
  count += kinds.moe * (m.num_moe_experts() * (MlpWeights(m, MoeWidth(m)) + m.hidden_size()) + shared);
  return count;
}

int64_t FlopsPerToken(const v1::ModelConfig& m) {
  const LayerCounts kinds = CountLayers(m);
  const int64_t h = m.hidden_size();
  const int64_t widths =
      m.ffn_hidden_size() * kinds.dense + MoeWidth(m) * TopK(m) * kinds.moe + m.moe_shared_expert_intermediate_size() * kinds.moe;
  const int64_t scan = 21 * MambaInnerWidth(m) * m.mamba_state_dim();      // 7 for each element of the state, three times.
  const int64_t state = 3 * DeltaValueWidth(m) * m.linear_key_head_dim();  // As GptModel::FlopsPerToken.
  return 6 * (kinds.attention * (AttentionWeights(m) + CoreAttention(m)) + kinds.delta * (DeltaWeights(m) + state) +
              kinds.mamba * MambaWeights(m) + h * GateFactor(m) * widths + h * m.vocab_size()) +
         kinds.mamba * scan;
}

// Layers over TP and PP, experts over EP and ETP, embeddings over TP (on the fuller of the end stages).
int64_t ParametersOfRank(const v1::ModelConfig& m) {
  const auto ways = [](int64_t n) { return std::max<int64_t>(1, n); };
  const int64_t tp = ways(m.tensor_model_parallel_size()), pp = ways(m.pipeline_model_parallel_size());
  const LayerCounts kinds = CountLayers(m);
  const int64_t experts = kinds.moe * m.num_moe_experts() * MlpWeights(m, MoeWidth(m));
  const int64_t layers = CountParameters(m) - EmbeddingWeights(m) - experts - NormWeights(m);
  const int64_t ep = ways(m.expert_model_parallel_size());
  const int64_t etp = m.has_expert_tensor_parallel_size() || ep > 1 ? ways(m.expert_tensor_parallel_size()) : tp;
  return layers / (tp * pp) + experts / (ep * etp * pp) + EmbeddingWeights(m) / tp + NormWeights(m);
}

}  // namespace mbridge::recipes
