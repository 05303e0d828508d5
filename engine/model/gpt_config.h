// What a GPT model is made of. A model family is data: a combination of these kinds, not a class. Field names and meanings are
// Megatron-Core's TransformerConfig and GPTModel arguments (megatron/core/transformer/transformer_config.py).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core/dtype.h"
#include "engine/model/low_precision.h"
#include "engine/ops/router.h"

namespace mbridge {

enum class NormKind : uint8_t { kLayerNorm, kRmsNorm };
// kGelu's form follows bias_activation_fusion, kGeluTanh is always the tanh approximation; GLU: gated by the activation; quick
// GELU: x sigmoid(1.702 x), of experts only.
enum class ActivationKind : uint8_t { kGelu, kSwiGlu, kGeluTanh, kGeglu, kGegluTanh, kSquaredRelu, kQuickGeglu };
enum class LoadBalancing : uint8_t { kNone, kBatch, kSequence };  // Over a microbatch's tokens, over each sequence's.
enum class PositionKind : uint8_t { kLearnedAbsolute, kRope, kNone };
// What lets the tokens of a layer see each other. kAttentionAndMamba2: both read one norm, and their outputs are added.
enum class MixerKind : uint8_t { kAttention, kMamba2, kGatedDeltaNet, kAttentionAndMamba2, kNone };
// Which layers are computed again in backward, from their inputs alone: none; all, with one kept input for several
// neighbours; the first few, each by itself; parts of every layer.
enum class Recompute : uint8_t { kNone, kUniform, kBlock, kSelective };

// Parts of a layer whose results are not kept.
struct RecomputeModules {
  bool operator==(const RecomputeModules&) const = default;
  bool core_attention = false;  // Probabilities of scores and their dropout mask. Flash attention has none.
  bool mlp = false;             // Both sides of the activation.
  bool layernorm = false;       // Outputs of the norms before attention and MLP.
  bool mla_up_proj = false;     // Queries, keys and values of multi-latent attention.
  bool moe = false;             // Everything of a layer's experts.
  bool moe_act = false;         // The experts' activation.
};

struct GptConfig {
  bool operator==(const GptConfig&) const = default;

  // Shape.
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_query_groups = 0;  // = num_attention_heads: no grouped-query attention.
  int64_t kv_channels = 0;       // Size of a head.
  int64_t ffn_hidden_size = 0;
  int64_t seq_length = 0;
  int64_t max_position_embeddings = 0;
  int64_t padded_vocab_size = 0;

  // Parts.
  NormKind normalization = NormKind::kLayerNorm;
  ActivationKind activation = ActivationKind::kGelu;
  PositionKind position_embedding = PositionKind::kLearnedAbsolute;
  bool add_bias_linear = true;
  bool add_qkv_bias = false;                   // A bias of linear_qkv alone, where add_bias_linear is off.
  bool add_attention_output_bias = false;      // The same of linear_proj,
  bool add_mlp_bias = false;                   // and of the dense MLP's two layers.
  bool qk_layernorm = false;                   // Norm of each query and key head, before the rotation; with RMSNorm only.
  bool qk_norm_over_projection = false;        // qk_layernorm spans all queries, and all keys, of a token instead of each head.
  bool pre_layernorm = true;                   // Norms before attention and MLP.
  bool post_layernorm = false;                 // Norms of what attention and MLP add to the residual stream.
  bool layernorm_zero_centered_gamma = false;  // Norm weights are stored minus one.
  bool attention_sinks = false;                // softmax_type = learnable: a score of each head that has no value.
  bool attention_output_gate = false;          // Attention's output is scaled by a sigmoid of what linear_qkv makes beside.
  int64_t attention_window = 0;                // Sliding window: keys that a query sees, its own included; 0: all before it.
  std::vector<int64_t> window_attn_skip_freq = {};  // By layer, 1: attention_window applies, 0: not; empty: it does everywhere.
  std::vector<int64_t> no_rope_freq = {};           // By layer, 1: no rotary positions; empty: everywhere.
  double softmax_scale = 0;                         // Of the attention scores; 0: 1 / sqrt(kv_channels).
  double attn_logit_softcapping = 0;                // Scores s become cap tanh(s / cap); 0: not.
  double final_logit_softcapping = 0;               // So do logits.
  double embedding_multiplier = 1;                  // Of the embeddings; rounded to the model dtype.
  double residual_multiplier = 1;                   // Of what attention and MLP add to the residual stream.
  double logits_scaling = 1;                        // Logits are divided by it, before the soft cap.
  bool tied_embeddings = true;                      // share_embeddings_and_output_weights.
  double layernorm_epsilon = 1e-5;

  // What layers are made of (hybrid_layer_pattern).
  std::vector<MixerKind> mixers = {};        // By layer; attention where the list ends.
  std::vector<int64_t> mlp_layer_freq = {};  // By layer, 1: an MLP or experts follow, 0: not; 1 where it ends.
  double attention_in_multiplier = 1;        // Of what attention reads; also of the output of linear_qkv.
  double key_multiplier = 1;                 // Of the keys.
  double attention_out_multiplier = 1;       // Of what attention adds to the residual stream.
  double mlp_gate_multiplier = 1;            // Of the gate half of linear_fc1.
  double mlp_out_multiplier = 1;             // Of what the MLP adds to the residual stream.

  // Mamba-2 (engine/model/mamba.h): mamba_num_heads of mamba_head_dim each.
  int64_t mamba_state_dim = 0;
  int64_t mamba_head_dim = 0;
  int64_t mamba_num_groups = 0;  // Of heads that share B and C.
  int64_t mamba_num_heads = 0;
  int64_t mamba_conv_kernel = 4;
  bool mamba_conv_bias = true;
  bool mamba_rms_norm = true;     // The gated output is normalised, in
  int64_t mamba_norm_groups = 0;  // this many groups; 0: mamba_num_groups.
  bool mamba_norm_before_gate = false;
  double mamba_dt_min = 0;                     // Bounds of the time steps, after softplus;
  double mamba_dt_max = 0;                     // 0: none.
  double mamba_in_multiplier = 1;              // Of what the mixer reads.
  double mamba_out_multiplier = 1;             // Of what it adds to the residual stream.
  std::vector<double> mamba_multipliers = {};  // Of the parts z, x, B, C and dt of in_proj's output; empty: 1.

  // Gated delta net (engine/model/gated_delta_net.h).
  int64_t linear_conv_kernel_dim = 4;
  int64_t linear_key_head_dim = 0;
  int64_t linear_value_head_dim = 0;
  int64_t linear_num_key_heads = 0;  // Of queries too.
  int64_t linear_num_value_heads = 0;

  // Multi-latent attention: keys and values from a latent vector of kv_lora_rank.
  bool multi_latent_attention = false;
  int64_t q_lora_rank = 0;  // Of the queries' latent vector; 0: none.
  int64_t kv_lora_rank = 0;
  int64_t qk_head_dim = 0;          // Part of a query or key that positions don't turn; kv_channels is the sum of both parts.
  int64_t qk_pos_emb_head_dim = 0;  // Part that they turn.
  int64_t v_head_dim = 0;
  double mscale_all_dim = 0;  // With YaRN, scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2; 0: not.

  // Mixture of experts: gated MLPs of which a router gives each token a few.
  int64_t num_moe_experts = 0;                      // 0: none.
  std::vector<int64_t> moe_layer_freq = {};         // By layer, 1: experts, 0: the plain MLP; empty: experts everywhere.
  int64_t moe_ffn_hidden_size = 0;                  // Width of an expert.
  int64_t moe_shared_expert_intermediate_size = 0;  // Width of the experts that every token gets, together; 0: none.
  bool moe_shared_expert_gate = false;              // Their output is scaled by a sigmoid of the input.
  int64_t moe_router_topk = 2;
  RouterScore moe_router_score = RouterScore::kSoftmaxOfChosen;  // moe_router_score_function and moe_router_pre_softmax.
  int64_t moe_router_num_groups = 0;                             // Groups of experts (engine/ops/router.h); 0: none.
  int64_t moe_router_group_topk = 0;
  int64_t moe_router_group_experts = 0;         // Best scores that a group's sum takes; 0: topk / group_topk, at least 1.
  double moe_router_topk_scaling_factor = 1.0;  // Of the probabilities.
  bool moe_router_fp32 = false;                 // moe_router_dtype.
  bool moe_router_enable_expert_bias = false;   // A bias of each expert, for the choice alone, moved towards equal load.
  double moe_router_bias_update_rate = 1e-3;
  LoadBalancing moe_load_balancing = LoadBalancing::kBatch;  // moe_router_load_balancing_type.
  double moe_aux_loss_coeff = 0.0;
  double moe_z_loss_coeff = 0.0;
  double activation_clamp = 0.0;   // activation_func_clamp_value, of experts: bounds of both halves; 0: none.
  double glu_linear_offset = 0.0;  // Added to the linear half, of experts.

  // Rotary positions (kRope).
  double rotary_base = 10000;
  double rotary_base_local = 0;             // Of the layers with a window, without any scaling; 0: rotary_base.
  bool rotary_interleaved = false;          // Pairs of neighbours are turned instead of halves of the head.
  double rotary_percent = 1.0;              // (0, 1]: share of a head that is turned.
  double seq_len_interpolation_factor = 0;  // Positions are divided by it; 0: not.
  bool rope_scaling = false;                // Llama 3's scaling of the frequencies, by the next four.
  double rope_scaling_factor = 8;
  double rope_low_freq_factor = 1;
  double rope_high_freq_factor = 4;
  double rope_original_length = 8192;
  double rope_dynamic_factor = 0;         // Sequences above rope_original_length: a larger base (dynamic NTK); 0: not.
  double yarn_rotary_scaling_factor = 0;  // YaRN from rope_original_length, by this and the next three; 0: not.
  double yarn_beta_fast = 32;
  double yarn_beta_slow = 1;
  bool yarn_correction_range_round_to_int = true;
  std::vector<double> long_rope_short_factors = {};  // LongRoPE: the frequencies are divided by these up to rope_original_length,
  std::vector<double> long_rope_long_factors = {};   // by these for longer sequences; empty: not.
  double rope_attention_factor = 1;                  // Of cosines and sines (YaRN, LongRoPE).

  // Regularisation.
  double hidden_dropout = 0.1;     // [0, 1); also after the embedding.
  double attention_dropout = 0.1;  // [0, 1).

  // Initial weights: normal with these deviations; biases 0, norms 1.
  double init_method_std = 0.02;
  double output_init_std = 0;     // linear_proj and linear_fc2; 0: init_method_std / sqrt(2 num_layers).
  double embedding_init_std = 0;  // Word and position tables; 0: init_method_std.

  // With several tensor-parallel ranks: norms, hidden dropouts and the residual stream on 1/ranks of the sequence each.
  bool sequence_parallel = false;

  // Memory for time: the bits are the same.
  Recompute recompute = Recompute::kNone;
  int64_t recompute_num_layers = 1;         // kUniform: layers for one kept input; kBlock: layers.
  RecomputeModules recompute_modules = {};  // kSelective.

  bool deterministic = false;  // On a GPU: the same bits in every run. A CPU's always are.

  // Numerics. The defaults are Megatron-LM's command line; Megatron-Bridge's vanilla GPT turns both fusions off.
  DType dtype = DType::kBF16;  // Parameters and activations: BF16, F16 or F32.
  // Linear layers of attention and plain MLPs; all else, output layer and master weights included, keeps its type.
  LowPrecisionOptions low_precision = {};
  // GELU: tanh approximation, one rounding; off: bias added with a rounding, then exact erf. SwiGLU: one rounding; off: each
  // step.
  bool bias_activation_fusion = true;
  bool bias_dropout_fusion = true;  // Compiled dropout mask, one rounding. Off: eager dropout mask, each step rounded.
  bool attention_softmax_in_fp32 = false;
  bool cross_entropy_loss_fusion =
      false;  // On: logit gradients are rounded to BF16 in every model dtype, as the fused kernel does.
};

// Keys that a query of a layer (counted from 0) sees; 0: all before it.
int64_t AttentionWindowOf(const GptConfig& config, int64_t layer);

// Whether a layer turns its queries and keys.
bool HasRope(const GptConfig& config, int64_t layer);

bool IsGated(ActivationKind kind);

MixerKind MixerOf(const GptConfig& config, int64_t layer);
// Whether a layer has attention, a Mamba-2 mixer, a gated delta net, an MLP or experts.
bool HasAttention(const GptConfig& config, int64_t layer);
bool HasMamba(const GptConfig& config, int64_t layer);
bool HasGatedDelta(const GptConfig& config, int64_t layer);
bool HasMlp(const GptConfig& config, int64_t layer);
// Layers that have it; `has` is one of the functions above or IsMoeLayer.
int64_t CountLayers(const GptConfig& config, bool (*has)(const GptConfig&, int64_t));

// Whether the MLP of a layer is a mixture of experts.
bool IsMoeLayer(const GptConfig& config, int64_t layer);

// Whether the linear layers of a layer run in low precision.
bool IsLowPrecisionLayer(const GptConfig& config, int64_t layer);

// Rows of linear_qkv.
int64_t QkvWidth(const GptConfig& config);

// Width of the attention's output, before linear_proj.
int64_t ContextWidth(const GptConfig& config);

// Width of the first MLP layer: gate and linear half of a gated activation.
int64_t Fc1Width(const GptConfig& config);

// The deviations with the zeros resolved.
double OutputInitStd(const GptConfig& config);
double EmbeddingInitStd(const GptConfig& config);

// Throws REASON_UNSUPPORTED_MODEL naming the first part that has no CUDA operator yet.
void RequireCudaParts(const GptConfig& config);

// Throws EngineError: REASON_INVALID_CONFIG naming field, value and range for impossible sizes, REASON_UNSUPPORTED_MODEL for
// parts that this engine does not build yet.
void ValidateGptConfig(const GptConfig& config);

}  // namespace mbridge
