#include "engine/model/mla.h"

#include <algorithm>

#include "engine/core/device.h"
#include "engine/model/norm.h"
#include "engine/ops/dropout.h"
#include "engine/ops/rms_norm.h"

namespace mbridge {
namespace {

RotaryPairs PairsOf(const GptConfig& c) { return c.rotary_interleaved ? RotaryPairs::kInterleaved : RotaryPairs::kHalves; }

const Tensor& DownOf(const MlaScratch& scratch, const MlaRecord& r) { return r.down.shape.rank() == 0 ? scratch.down : r.down; }

// MlaUpForward; x of the whole sequence.
void UpFromWhole(const Step& step, const MlaParameters& p, const Weights& weights, const MlaScratch& scratch, const MlaRecord& r,
                 const Tensor& x, const Tensor& qkv) {
  if (step.config->q_lora_rank > 0) {
    p.q_up.Forward(step, weights, r.q_normed, scratch.query);
  } else {
    p.q.Forward(step, weights, x, scratch.query);
  }
  p.kv_up.Forward(step, weights, r.latent_normed, scratch.key_value);
  MlaJoinHeads(step.context, scratch.query, scratch.key_value, DownOf(scratch, r), step.rotary_cosine, step.rotary_sine,
               MlaLayoutOf(*step.config), PairsOf(*step.config), step.precision, qkv);
}

}  // namespace

MlaLayout MlaLayoutOf(const GptConfig& c) { return {c.num_attention_heads, c.qk_head_dim, c.qk_pos_emb_head_dim, c.v_head_dim}; }

int64_t LargestMlaWeight(const GptConfig& c) {
  const MlaLayout layout = MlaLayoutOf(c);
  const int64_t query = layout.query_width() * (c.q_lora_rank > 0 ? c.q_lora_rank : c.hidden_size);
  return std::max({query, c.q_lora_rank * c.hidden_size, (c.kv_lora_rank + c.qk_pos_emb_head_dim) * c.hidden_size,
                   layout.key_value_width() * c.kv_lora_rank, c.num_attention_heads * c.v_head_dim * c.hidden_size});
}

MlaParameters DeclareMla(const GptConfig& c, const std::string& prefix,
                         const std::function<int(const ParameterDeclaration&)>& declare) {
  const MlaLayout layout = MlaLayoutOf(c);
  const InitRule normal{InitRule::Kind::kModelParallelNormal, static_cast<float>(c.init_method_std)};
  const auto linear = [&](const char* name, int64_t out, int64_t in, int axis) {
    Linear layer;
    layer.weight = declare({.name = prefix + name + ".weight", .shape = {out, in}, .rule = normal, .axis = axis});
    return layer;
  };
  const auto gamma = [&](const char* name, int64_t width) {
    return declare({.name = prefix + name + ".weight", .shape = {width}, .rule = {InitRule::Kind::kConstant, 1.0f}});
  };
  MlaParameters p;
  if (c.q_lora_rank > 0) {
    p.q_down = linear("linear_q_down_proj", c.q_lora_rank, c.hidden_size, -1);
    p.q_up = linear("linear_q_up_proj", layout.query_width(), c.q_lora_rank, 0);
  } else {
    p.q = linear("linear_q_proj", layout.query_width(), c.hidden_size, 0);
  }
  p.kv_down = linear("linear_kv_down_proj", c.kv_lora_rank + c.qk_pos_emb_head_dim, c.hidden_size, -1);
  p.kv_up = linear("linear_kv_up_proj", layout.key_value_width(), c.kv_lora_rank, 0);
  if (c.q_lora_rank > 0) p.q_gamma = gamma("q_layernorm", c.q_lora_rank);
  p.kv_gamma = gamma("kv_layernorm", c.kv_lora_rank);
  return p;
}

MlaRecord MlaRecord::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const int64_t s = step.seq_length, b = step.micro_batch_size;
  const auto activation = [&](int64_t width) { return arena->Allocate(step.storage, {s, b, width}); };
  MlaRecord r;
  if (c.q_lora_rank > 0) {
    r.q_down = activation(c.q_lora_rank);
    r.q_normed = activation(c.q_lora_rank);
    r.q_rstd = arena->Allocate(DType::kF32, {s * b});
  }
  r.latent = activation(c.kv_lora_rank);
  r.latent_normed = activation(c.kv_lora_rank);
  r.kv_rstd = arena->Allocate(DType::kF32, {s * b});
  if (c.recompute == Recompute::kSelective && c.recompute_modules.mla_up_proj)
    r.down = activation(c.kv_lora_rank + c.qk_pos_emb_head_dim);
  return r;
}

MlaScratch MlaScratch::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const MlaLayout layout = MlaLayoutOf(c);
  const auto activation = [&](int64_t width) {
    return arena->Allocate(step.storage, {step.seq_length, step.micro_batch_size, width});
  };
  MlaScratch scratch;
  scratch.query = activation(layout.query_width());
  scratch.key_value = activation(layout.key_value_width());
  scratch.down = activation(c.kv_lora_rank + c.qk_pos_emb_head_dim);
  if (c.q_lora_rank > 0) scratch.d_query_latent = activation(c.q_lora_rank);
  scratch.d_latent = activation(c.kv_lora_rank);
  scratch.hidden = activation(c.hidden_size);
  if (step.tensor_parallel.sequence_parallel) scratch.partial = activation(c.hidden_size);
  return scratch;
}

void MlaForward(const Step& step, const MlaParameters& p, const Weights& weights, const MlaScratch& scratch, const MlaRecord& r,
                const Tensor& own_x, const Tensor& qkv) {
  const GptConfig& c = *step.config;
  const Tensor x = GatherSequence(step, own_x);
  if (c.q_lora_rank > 0) {
    p.q_down.Forward(step, weights, x, r.q_down);
    RmsNormForward(step.context, r.q_down, weights.value(p.q_gamma), NormOptionsOf(step), r.q_normed, r.q_rstd);
  }
  const Tensor& down = DownOf(scratch, r);
  p.kv_down.Forward(step, weights, x, down);
  CopyColumns(step.context, down, 0, r.latent, 0, c.kv_lora_rank, step.precision);
  RmsNormForward(step.context, r.latent, weights.value(p.kv_gamma), NormOptionsOf(step), r.latent_normed, r.kv_rstd);
  UpFromWhole(step, p, weights, scratch, r, x, qkv);
}

void MlaUpForward(const Step& step, const MlaParameters& p, const Weights& weights, const MlaScratch& scratch, const MlaRecord& r,
                  const Tensor& x, const Tensor& qkv) {
  UpFromWhole(step, p, weights, scratch, r, step.config->q_lora_rank > 0 ? Tensor() : GatherSequence(step, x), qkv);
}

void MlaBackward(const Step& step, const MlaParameters& p, const Weights& weights, const MlaScratch& scratch, const MlaRecord& r,
                 const Tensor& own_x, const Tensor& d_qkv, const Tensor& dx, const Tensor& weight_grad) {
  const GptConfig& c = *step.config;
  const bool several = step.tensor_parallel.size() > 1;
  const Tensor x = GatherSequence(step, own_x);
  // The gradient of x on this rank; what all ranks have alike joins it on one.
  const Tensor partial = step.tensor_parallel.sequence_parallel ? scratch.partial : dx;
  MlaSplitHeads(step.context, d_qkv, step.rotary_cosine, step.rotary_sine, MlaLayoutOf(c), PairsOf(c), step.precision,
                scratch.query, scratch.key_value, scratch.down);
  p.kv_up.Backward(step, weights, scratch.key_value, r.latent_normed, scratch.d_latent, weight_grad);
  if (several) {  // Every rank has the part of its heads: of the latent vector and of the keys' turned part.
    CopyColumns(step.context, scratch.d_latent, 0, scratch.down, 0, c.kv_lora_rank, step.precision);
    SumOverRanks(step, scratch.down);
    CopyColumns(step.context, scratch.down, 0, scratch.d_latent, 0, c.kv_lora_rank, step.precision);
  }
  RmsNormBackward(step.context, scratch.d_latent, r.latent, weights.value(p.kv_gamma), r.kv_rstd, {}, NormOptionsOf(step),
                  scratch.d_latent, weights.main_grad(p.kv_gamma));
  CopyColumns(step.context, scratch.d_latent, 0, scratch.down, 0, c.kv_lora_rank, step.precision);
  p.kv_down.Backward(step, weights, scratch.down, x, scratch.hidden, weight_grad);
  if (c.q_lora_rank > 0) {
    const Tensor& d_latent = scratch.d_query_latent;
    p.q_up.Backward(step, weights, scratch.query, r.q_normed, d_latent, weight_grad);
    SumOverRanks(step, d_latent);
    RmsNormBackward(step.context, d_latent, r.q_down, weights.value(p.q_gamma), r.q_rstd, {}, NormOptionsOf(step), d_latent,
                    weights.main_grad(p.q_gamma));
    p.q_down.Backward(step, weights, d_latent, x, partial, weight_grad);
  } else {
    p.q.Backward(step, weights, scratch.query, x, partial, weight_grad);
  }
  const bool alone = c.q_lora_rank > 0;  // Then all of it is alike.
  if (step.tensor_parallel.rank() == 0) {
    BiasDropoutAddForward(step.context, scratch.hidden, {}, partial, {}, 0.0, DropoutKind::kCompiled, step.precision, partial);
  } else if (alone) {
    DeviceOf(step.context.device).Zero(step.context, partial.data, partial.bytes());
  }
  SumPartial(step, partial, dx);
}

void ValidateMla(const GptConfig& c) {
  if (!c.multi_latent_attention) return;
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw EngineError(v1::REASON_INVALID_CONFIG, message);
  };
  const auto positive = [&](const char* field, int64_t value) {
    require(value > 0, fmt::format("model.{} is {}: at least 1 with model.multi_latent_attention", field, value));
  };
  positive("kv_lora_rank", c.kv_lora_rank);
  positive("qk_head_dim", c.qk_head_dim);
  positive("qk_pos_emb_head_dim", c.qk_pos_emb_head_dim);
  positive("v_head_dim", c.v_head_dim);
  require(c.q_lora_rank >= 0, fmt::format("model.q_lora_rank is {}: at least 1, or null for none", c.q_lora_rank));
  require(c.num_query_groups == c.num_attention_heads,
          fmt::format("model.num_query_groups is {}: {} with model.multi_latent_attention, as model.num_attention_heads",
                      c.num_query_groups, c.num_attention_heads));
  const auto unsupported = [](bool wanted, std::string_view what) {
    if (wanted) {
      throw EngineError(v1::REASON_UNSUPPORTED_MODEL,
                        fmt::format("this engine does not build multi-latent attention with {} yet", what));
    }
  };
  unsupported(c.add_bias_linear || c.add_qkv_bias, "biases");
  unsupported(c.normalization != NormKind::kRmsNorm, "LayerNorm");
  unsupported(c.qk_norm_over_projection, "norms over whole projections");
  unsupported(c.position_embedding != PositionKind::kRope || !c.no_rope_freq.empty(), "layers without rotary positions");
  unsupported(c.rotary_base_local > 0, "a rotary base of its own in windowed layers");
}

}  // namespace mbridge
