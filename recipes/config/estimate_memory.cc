// The engine's arena as formulas: LayerRecord, LayerScratch and OutputHeadScratch of engine/model, for a rank without the engine.
#include <algorithm>
#include <cmath>

#include "proto/format/gpu_memory.h"
#include "recipes/config/estimate.h"
#include "recipes/config/layers.h"

namespace mbridge::recipes {
namespace {

// As engine/model/output_head.cc has it.
constexpr int64_t kGpuLogits = int64_t{2} << 30;

int64_t Ways(int64_t n) { return std::max<int64_t>(1, n); }

// Sizes of one rank.
struct Sizes {
  explicit Sizes(const v1::ConfigContainer& config, v1::Device device) : m(config.model()), gpu(device == v1::DEVICE_CUDA) {
    const int64_t tp = Ways(m.tensor_model_parallel_size());
    narrow = m.bf16() || m.fp16();
    e = narrow && gpu ? 2 : 4;  // A CPU without BF16 products computes in fp32.
    b = config.train().micro_batch_size();
    s = m.seq_length() / Ways(m.context_parallel_size());
    tokens = s * b;
    stream = tokens / (m.sequence_parallel() ? tp : 1);
    h = m.hidden_size();
    heads = m.num_attention_heads() / tp;
    const int64_t groups = m.num_query_groups() / tp;
    latent = m.multi_latent_attention();
    qkv = latent ? heads * (2 * (m.qk_head_dim() + m.qk_pos_emb_head_dim()) + m.v_head_dim())
                 : (heads + 2 * groups) * m.kv_channels();
    context = heads * (latent ? m.v_head_dim() : m.kv_channels());
    head_norms = m.qk_layernorm() && !latent ? heads + groups : 0;
    halves = m.gated_linear_unit() ? 2 : 1;
    ffn = m.ffn_hidden_size() / tp;
    vocabulary = m.vocab_size() / tp;
    flash = gpu && narrow && m.attention_dropout() == 0 && !m.attention_softmax_in_fp32() && m.attn_logit_softcapping() == 0 &&
            !latent && m.kv_channels() % 8 == 0 && m.kv_channels() <= 256;
    norm_floats = m.normalization() == "RMSNorm" ? 1 : 2;
    pre_norm = !m.has_pre_layernorm() || m.pre_layernorm();
    experts = m.num_moe_experts();
    chosen = m.has_moe_router_topk() ? m.moe_router_topk() : 2;
    expert_ffn = (m.has_moe_ffn_hidden_size() ? m.moe_ffn_hidden_size() : m.ffn_hidden_size()) /
                 (m.has_expert_tensor_parallel_size() ? Ways(m.expert_tensor_parallel_size()) : tp);
    shared = m.moe_shared_expert_intermediate_size() / tp;
    const LayerCounts layers = CountLayers(m);
    if (layers.dense == 0) ffn = 0;
    if (layers.attention == 0) qkv = context = 0;
    if (layers.mamba > 0) {
      mamba_inner = MambaInnerWidth(m) / tp;
      mamba_width = MambaConvolutionWidth(m) / tp;
      mamba_heads = MambaHeads(m) / tp;
    }
    delta = layers.delta;
  }
  const v1::ModelConfig& m;
  bool gpu, narrow = false, latent = false, flash = false, pre_norm = true;
  int64_t e = 0, b = 0, s = 0, tokens = 0, stream = 0, h = 0, heads = 0, qkv = 0, context = 0, head_norms = 0, halves = 1,
          ffn = 0, vocabulary = 0, norm_floats = 1, experts = 0, chosen = 0, expert_ffn = 0, shared = 0, mamba_inner = 0,
          mamba_width = 0, mamba_heads = 0, delta = 0;
};

// What a layer keeps from forward to backward, by the modules of model.recompute_modules.
struct Kept {
  int64_t input = 0, core_attention = 0, norms = 0, heads = 0, mlp = 0, expert_activation = 0, other = 0;
  int64_t total() const { return input + core_attention + norms + heads + mlp + expert_activation + other; }
};

void KeepAttention(const Sizes& z, Kept* kept) {
  const v1::ModelConfig& m = z.m;
  const int64_t scores = z.b * z.heads * z.s * z.s;
  kept->other += z.tokens * z.context * z.e;
  if (z.flash) {
    kept->other += 4 * z.b * z.heads * z.s;
  } else {
    kept->core_attention = scores * ((m.attention_softmax_in_fp32() || !z.narrow ? 4 : 2) + (m.attention_dropout() > 0 ? 1 : 0));
  }
  if (m.softmax_type() == "learnable") kept->other += 4 * z.b * z.heads * z.s;
  kept->heads = z.tokens * z.qkv * z.e;
  if (z.head_norms > 0) kept->other += z.tokens * (z.qkv * z.e + 4 * (m.qk_norm_over_projection() ? 2 : z.head_norms));
  if (m.attention_output_gate()) kept->other += 2 * z.tokens * z.context * z.e;
  if (z.latent) kept->other += z.tokens * (2 * z.e * (m.q_lora_rank() + m.kv_lora_rank()) + 4 * (m.q_lora_rank() > 0 ? 2 : 1));
}

// Of a gated delta net: projected, mixed, output and gated output; decays, betas and the norm's statistics; the state before each
// 64 tokens (engine/ops/gated_delta_rule.h).
int64_t DeltaKept(const Sizes& z) {
  const v1::ModelConfig& m = z.m;
  const int64_t heads = m.linear_num_value_heads(), keys = DeltaKeyWidth(m), values = DeltaValueWidth(m);
  const int64_t states = z.b * heads * ((z.s + 63) / 64) * m.linear_key_head_dim() * m.linear_value_head_dim();
  return z.tokens * (DeltaProjectionWidth(m) + 2 * keys + 3 * values) * z.e + 12 * z.tokens * heads + 4 * states;
}

// Gradients of the first of these.
int64_t DeltaScratch(const Sizes& z) {
  const v1::ModelConfig& m = z.m;
  return z.tokens * (DeltaProjectionWidth(m) + 2 * DeltaKeyWidth(m) + 2 * DeltaValueWidth(m)) * z.e +
         8 * z.tokens * m.linear_num_value_heads();
}

void KeepMlp(const Sizes& z, bool moe, Kept* kept) {
  if (!moe) {
    kept->mlp = z.tokens * (z.halves + 1) * z.ffn * z.e;
    return;
  }
  const int64_t rows = z.tokens * z.chosen, shared = z.shared;
  kept->mlp = z.tokens * (8 * z.experts + 8 * z.chosen) + 8 * rows + rows * 2 * z.expert_ffn * z.e + z.tokens * 3 * shared * z.e;
  if (z.m.moe_shared_expert_gate()) kept->mlp += z.tokens * (z.h * z.e + 4);
  kept->expert_activation = rows * z.expert_ffn * z.e;
}

// Whether the linear layers of a layer run on 8-bit or 4-bit operands.
bool IsNarrowLayer(const v1::ModelConfig& m, int64_t layer) {
  if (!m.has_fp8() && !m.has_fp4()) return false;
  if (!m.first_last_layers_bf16()) return true;
  return layer >= m.num_layers_at_start_in_bf16() && layer < m.num_layers() - m.num_layers_at_end_in_bf16();
}

// Whether their products take 8-bit codes; otherwise that is emulated.
bool TakesCodes(const Sizes& z) {
  const std::string& recipe = z.m.fp8_recipe();
  if (!z.m.has_fp8() || recipe == "mxfp8") return false;
  const bool blocks = z.h % 128 == 0 && z.qkv % 128 == 0 && z.context % 128 == 0 && z.ffn % 128 == 0 && z.tokens % 128 == 0;
  return recipe != "blockwise" || blocks;
}

// Copies of the weights of narrow layers, and what all of them share.
int64_t NarrowBytes(const Sizes& z) {
  const v1::ModelConfig& m = z.m;
  int64_t weights = 0;
  for (int64_t i = 0; i < std::min<int64_t>(m.num_layers(), 1 << 20) / Ways(m.pipeline_model_parallel_size()); ++i) {
    const LayerParts parts = PartsOf(m, i);
    if (!IsNarrowLayer(m, i)) continue;
    if (parts.attention) weights += z.h * (z.context + (z.latent ? 0 : z.qkv));
    if (parts.mlp && !parts.moe) weights += z.h * (z.halves + 1) * z.ffn;
  }
  if (weights == 0) return 0;
  const int64_t most_in = std::max({z.h, z.context, z.ffn}), most_out = std::max({z.h, z.qkv, z.halves * z.ffn});
  if (TakesCodes(z)) return 2 * weights + z.tokens * (most_in + (m.fp8_wgrad() ? 2 : 1) * most_out);
  const int64_t copies = m.has_fp8() && m.fp8_recipe() == "mxfp8" ? 2 : 1;
  return copies * z.e * weights + z.tokens * z.e * (std::max(most_in, most_out) + most_out);
}

// Codes in place of the inputs of narrow linear layers.
void KeepCodes(const Sizes& z, const LayerParts& parts, Kept* kept) {
  if (!TakesCodes(z) || !z.m.fp8_wgrad()) return;
  const bool mlp = parts.mlp && !parts.moe;
  if (parts.attention) kept->other += z.tokens * z.context;
  if (mlp) kept->mlp += z.tokens * z.ffn * (1 - z.e);
  if (z.m.sequence_parallel()) return;
  const int64_t codes = z.tokens * z.h, input = z.pre_norm ? z.stream * z.h * z.e : 0;
  if (parts.attention && !z.latent) kept->norms += codes - (parts.mamba ? 0 : input);
  if (mlp) kept->norms += codes - input;
}

Kept KeptByLayer(const Sizes& z, const LayerParts& parts) {
  const v1::ModelConfig& m = z.m;
  const int64_t stream = z.stream * z.h * z.e, blocks = (parts.mixer() ? 1 : 0) + (parts.mlp ? 1 : 0);
  Kept kept;
  kept.input = stream;
  if (blocks == 2) kept.other += stream;
  if (m.hidden_dropout() > 0) kept.other += blocks * z.stream * z.h;
  if (z.pre_norm) kept.other += blocks * z.stream * 4 * z.norm_floats;
  if (z.pre_norm) kept.norms = blocks * stream;
  if (m.post_layernorm()) kept.other += 2 * (z.stream * 4 * z.norm_floats + stream);
  if (parts.attention) KeepAttention(z, &kept);
  if (parts.mamba) kept.other += z.tokens * (3 * z.mamba_inner + 2 * z.mamba_width + z.mamba_heads) * z.e;
  if (parts.delta) kept.other += DeltaKept(z);
  if (parts.mlp) KeepMlp(z, parts.moe, &kept);
  return kept;
}

// Of `kept`, what selective recomputation drops.
int64_t Dropped(const v1::ModelConfig& m, const Kept& kept, bool latent, bool moe) {
  const auto& names = m.recompute_modules();
  const auto has = [&names](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  int64_t bytes = names.empty() || has("core_attn") ? kept.core_attention : 0;
  if (has("layernorm")) bytes += kept.norms;
  if (has("mla_up_proj") && latent) bytes += kept.heads;
  if (moe ? has("moe") : has("mlp")) bytes += kept.mlp;
  if (moe && (has("moe") || has("moe_act"))) bytes += kept.expert_activation;
  return bytes;
}

int64_t LayerBytes(const Sizes& z) {
  const v1::ModelConfig& m = z.m;
  const int64_t count = std::min<int64_t>(m.num_layers(), 1 << 20) / Ways(m.pipeline_model_parallel_size());
  const bool full = m.recompute_granularity() == "full", selective = m.recompute_granularity() == "selective";
  const bool uniform = full && m.recompute_method() != "block";
  int64_t bytes = 0, shared = 0, group = 0;  // shared: of the largest group of layers that are made again.
  for (int64_t i = 0; i < count; ++i) {
    const LayerParts parts = PartsOf(m, i);
    Kept kept = KeptByLayer(z, parts);
    if (IsNarrowLayer(m, i)) KeepCodes(z, parts, &kept);
    if (selective) {
      const int64_t dropped = Dropped(m, kept, z.latent, parts.moe);
      bytes += kept.total() - dropped;
      shared = std::max(shared, dropped);
    } else if (uniform || (full && i < m.recompute_num_layers())) {
      const bool first = !uniform || i % Ways(m.recompute_num_layers()) == 0;
      if (first) group = -kept.input;
      if (first) bytes += kept.input;
      group += kept.total();
      shared = std::max(shared, group);
    } else {
      bytes += kept.total();
    }
  }
  return bytes + shared;
}

int64_t AttentionWorkspace(const Sizes& z) {
  if (!z.gpu) return 0;
  const int64_t groups = z.m.num_query_groups() / Ways(z.m.tensor_model_parallel_size()), d = z.m.kv_channels();
  if (z.flash) {
    const int64_t padded = (z.s + 127) / 128 * 128, rows = z.b * z.heads * padded;
    return (1 << 20) + rows * 4 + (z.m.deterministic_mode() ? rows * padded * 2 : rows * d * 4) +
           (z.heads != groups ? 4 * rows * d : 0);
  }
  const int64_t plane = z.s * ((z.s + 7) / 8 * 8);
  const int64_t chunk =
      std::clamp<int64_t>((int64_t{256} << 20) / Ways(plane * z.e), 1, std::clamp<int64_t>(z.b * groups, 1, 32768));
  const int64_t head_grads = z.heads == groups ? 0 : z.b * z.heads * z.s * d;
  return (2 * chunk * plane + 2 * head_grads) * z.e + (z.m.attn_logit_softcapping() > 0 ? 4 * chunk * plane : 0);
}

int64_t HeadBytes(const Sizes& z) {
  const bool plain = z.gpu && z.m.tensor_model_parallel_size() <= 1 && z.m.final_logit_softcapping() == 0 &&
                     (!z.m.has_logits_scaling() || z.m.logits_scaling() == 1);
  const int64_t row = Ways(z.vocabulary * z.e);
  const int64_t block = std::min(z.tokens, z.gpu ? std::max<int64_t>(kGpuLogits / row / 1024, 1) * 1024 : int64_t{2048});
  const int64_t columns = z.gpu ? z.vocabulary : std::min<int64_t>(2000, z.vocabulary);
  return block * z.vocabulary * (z.narrow ? 2 : 4) + (plain ? 0 : block * (columns + 16) * z.e) + z.tokens * z.h * z.e +
         12 * (z.tokens + block) + (z.gpu ? 0 : 4 * z.vocabulary * z.h);
}

// The scan's states: about 2 sqrt(s) of a head for each thread, and its share of the gradients of B and C.
int64_t MambaScratch(const Sizes& z) {
  constexpr int64_t kThreads = 16;
  const int64_t state = z.m.mamba_head_dim() * z.m.mamba_state_dim();
  const auto kept = static_cast<int64_t>(2 * std::sqrt(static_cast<double>(z.s)) + 3);
  const int64_t thread = 4 * (kept * state + 2 * z.s * z.m.mamba_state_dim());
  return z.tokens * (2 * z.mamba_inner + 2 * z.mamba_width + z.mamba_heads) * z.e + z.stream * z.h * z.e + kThreads * thread;
}

int64_t ScratchBytes(const Sizes& z) {
  const v1::ModelConfig& m = z.m;
  int64_t bytes = z.stream * z.h * z.e + 4 * z.tokens * z.h + (m.sequence_parallel() ? z.tokens * z.h * z.e : 0);
  bytes += 2 * z.stream * z.h * z.e + z.tokens * z.e * (z.context + z.qkv + z.ffn * (z.halves == 2 ? 3 : 1));
  if (m.position_embedding_type() == "rope" || m.position_embedding_type() == "yarn") bytes += 4 * z.s * m.kv_channels();
  const int64_t gate = m.attention_output_gate() ? z.context : 0;
  if (!z.gpu) {
    bytes += 4 * z.h *
             std::max({z.halves * z.ffn, z.context, z.qkv + gate, z.mamba_inner + z.mamba_width + z.mamba_heads,
                       z.delta > 0 ? DeltaProjectionWidth(m) : 0});
  }
  if (gate > 0) bytes += z.tokens * (z.qkv + 2 * gate) * z.e;
  if (z.mamba_heads > 0) bytes += MambaScratch(z);
  if (z.delta > 0) bytes += DeltaScratch(z);
  if (z.latent) {
    bytes += z.tokens * z.e *
             (z.heads * (2 * m.qk_head_dim() + m.qk_pos_emb_head_dim() + m.v_head_dim()) + 2 * m.kv_lora_rank() +
              m.qk_pos_emb_head_dim() + m.q_lora_rank() + z.h);
  }
  if (z.experts > 0) {
    const int64_t rows = z.tokens * z.chosen, shared = z.shared;
    if (m.sequence_parallel()) bytes += 2 * z.tokens * z.h * z.e;
    bytes += rows * z.e * (2 * z.h + 3 * z.expert_ffn) + z.tokens * (4 * (z.experts + z.chosen) + z.e * (z.h + 3 * shared));
    if (z.e != 4) bytes += 4 * z.h * (z.tokens + z.experts);
    bytes += 4 * z.h * std::max({2 * z.expert_ffn, 2 * shared, z.experts});
  }
  return bytes + AttentionWorkspace(z) + HeadBytes(z);
}

}  // namespace

v1::MemoryEstimate EstimateMemory(const v1::ConfigContainer& config, int data_parallel, v1::Device device) {
  const v1::ModelConfig& m = config.model();
  const Sizes z(config, device);
  const int64_t parameters = ParametersOfRank(m), type = z.narrow ? 2 : 4;
  const bool aware = config.optimizer().use_precision_aware_optimizer();
  const int64_t moments = config.optimizer().exp_avg_dtype() == "bf16" ? 4 : 8;
  const int64_t masters = type == 4 ? 0 : (aware && m.bf16() && config.optimizer().store_param_remainders() ? 2 : 4);
  v1::MemoryEstimate estimate;
  estimate.set_parameters(CountParameters(m));
  estimate.set_weight_bytes(parameters * (type + (z.e != type ? z.e : 0)));
  estimate.set_gradient_bytes(parameters * 4);
  estimate.set_optimizer_bytes(parameters * (moments + masters) /
                               (config.ddp().use_distributed_optimizer() ? std::max(1, data_parallel) : 1));
  const int64_t ends = z.stream * (z.h * (2 * z.e + (m.hidden_dropout() > 0 ? 1 : 0)) + 4 * z.norm_floats);
  estimate.set_activation_bytes(LayerBytes(z) + ends);
  estimate.set_workspace_bytes(ScratchBytes(z) + NarrowBytes(z) + (z.gpu ? static_cast<int64_t>(kOperatorWorkspaceBytes) : 0));
  const bool sharded = config.ddp().use_distributed_optimizer() || config.optimizer().use_distributed_optimizer();
  const bool overlaps = data_parallel > 1 && m.cuda_graph_impl() != "local" && m.cuda_graph_impl() != "full_iteration" &&
                        (config.ddp().overlap_grad_reduce() || (config.ddp().overlap_param_gather() && sharded));
  if (z.gpu) estimate.set_runtime_bytes(GpuRuntimeBytes(Ways(m.tensor_model_parallel_size()), data_parallel, overlaps));
  estimate.set_checkpoint_bytes(CountParameters(m) * (type + (config.checkpoint().save_optim() ? moments + masters : 0)));
  return estimate;
}

}  // namespace mbridge::recipes
