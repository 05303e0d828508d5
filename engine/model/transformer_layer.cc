#include "engine/model/transformer_layer.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "engine/ops/bias_add.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/rms_norm.h"
#include "engine/ops/rotary.h"
#include "engine/ops/swiglu.h"

namespace mbridge {
namespace {

int64_t QueryWidth(const GptConfig& c) { return c.num_attention_heads * c.kv_channels; }

Tensor BiasOf(const Weights& weights, const Linear& linear) { return linear.bias < 0 ? Tensor() : weights.value(linear.bias); }
Tensor BiasGradOf(const Weights& weights, const Linear& linear) {
  return linear.bias < 0 ? Tensor() : weights.main_grad(linear.bias);
}

DropoutKind HiddenDropoutKind(const GptConfig& c) { return c.bias_dropout_fusion ? DropoutKind::kCompiled : DropoutKind::kEager; }
GeluKind GeluKindOf(const GptConfig& c) { return c.bias_activation_fusion ? GeluKind::kTanhFused : GeluKind::kErf; }
SwiGluKind SwiGluKindOf(const GptConfig& c) { return c.bias_activation_fusion ? SwiGluKind::kFused : SwiGluKind::kEager; }

std::span<uint8_t> BytesOf(const Tensor& keep) { return {keep.as<uint8_t>(), static_cast<size_t>(keep.size())}; }

// The mask of a hidden dropout; empty where there is none.
Tensor DrawHiddenMask(const Step& step, const Tensor& keep) {
  const GptConfig& c = *step.config;
  if (!step.training() || c.hidden_dropout == 0.0) return {};
  PhiloxStream* stream = &step.streams->default_stream;
  if (c.bias_dropout_fusion) {
    CompiledDropoutMask(DrawCompiledSeed(stream), c.hidden_dropout, BytesOf(keep));
  } else {
    EagerDropoutMask(stream, step.streams->sm_count, c.hidden_dropout, static_cast<int>(SizeOf(step.precision)), BytesOf(keep));
  }
  return keep;
}

Tensor DrawAttentionMask(const Step& step, const Tensor& keep) {
  const GptConfig& c = *step.config;
  if (!step.training() || c.attention_dropout == 0.0) return {};
  EagerDropoutMask(&step.streams->model_parallel, step.streams->sm_count, c.attention_dropout,
                   static_cast<int>(SizeOf(step.precision)), BytesOf(keep));
  return keep;
}

QkvLayout LayoutOf(const GptConfig& c) { return {c.num_attention_heads, c.num_query_groups, c.kv_channels}; }

// record->qkv from record->projected.
void PrepareHeads(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r) {
  const GptConfig& c = *step.config;
  if (c.qk_layernorm) {
    QkNormForward(step.context, r.projected, weights.value(p.query_gamma), weights.value(p.key_gamma), LayoutOf(c),
                  static_cast<float>(c.layernorm_epsilon), step.precision, r.qkv, r.qk_rstd);
  }
  if (c.position_embedding == PositionKind::kRope) {
    Rotary(step.context, r.qkv, step.rotary_cosine, step.rotary_sine, LayoutOf(c), RotaryDirection::kForward, step.precision);
  }
}

// d_qkv: of record.qkv on entry, of record.projected on return.
void PrepareHeadsBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r,
                          const Tensor& d_qkv) {
  const GptConfig& c = *step.config;
  if (c.position_embedding == PositionKind::kRope) {
    Rotary(step.context, d_qkv, step.rotary_cosine, step.rotary_sine, LayoutOf(c), RotaryDirection::kBackward, step.precision);
  }
  if (c.qk_layernorm) {
    QkNormBackward(step.context, d_qkv, r.projected, weights.value(p.query_gamma), weights.value(p.key_gamma), r.qk_rstd,
                   LayoutOf(c), step.precision, weights.main_grad(p.query_gamma), weights.main_grad(p.key_gamma));
  }
}

void ActivationForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r) {
  const GptConfig& c = *step.config;
  const Tensor bias = BiasOf(weights, p.fc1);
  if (c.activation == ActivationKind::kSwiGlu) {
    SwiGluForward(step.context, r.fc1_output, bias, SwiGluKindOf(c), step.precision, r.activated);
  } else {
    BiasGeluForward(step.context, r.fc1_output, bias, GeluKindOf(c), step.precision, r.activated);
  }
}

// scratch.d_fc1 from scratch.d_activated.
void ActivationBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r,
                        const LayerScratch& scratch) {
  const GptConfig& c = *step.config;
  const Tensor bias = BiasOf(weights, p.fc1);
  if (c.activation == ActivationKind::kSwiGlu) {
    SwiGluBackward(step.context, scratch.d_activated, r.fc1_output, bias, SwiGluKindOf(c), step.precision, scratch.d_fc1);
  } else {
    BiasGeluBackward(step.context, scratch.d_activated, r.fc1_output, bias, GeluKindOf(c), step.precision, scratch.d_fc1);
  }
}

void AttentionBlockForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                           LayerRecord* r) {
  const GptConfig& c = *step.config;
  p.input_norm.Forward(step, weights, r->input, r->input_norm, r->normed_input);
  p.qkv.Forward(step, weights, r->normed_input, r->projected);
  if (p.qkv.bias >= 0) {
    BiasAdd(step.context, r->projected, BiasOf(weights, p.qkv), step.precision);
  } else {
    Convert(step.context, r->projected, step.precision, r->projected);
  }
  PrepareHeads(step, p, weights, *r);
  const Tensor keep = DrawAttentionMask(step, r->attention_keep);
  AttentionForward(step.context, r->qkv, keep, AttentionOptionsOf(step), step.training() ? r->probabilities : Tensor(),
                   r->context, scratch.attention);
  p.proj.Forward(step, weights, r->context, scratch.hidden_a);
  BiasDropoutAddForward(step.context, scratch.hidden_a, BiasOf(weights, p.proj), r->input, DrawHiddenMask(step, r->proj_keep),
                        c.hidden_dropout, HiddenDropoutKind(c), step.precision, r->middle);
}

void MlpBlockForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                     LayerRecord* r, const Tensor& output) {
  const GptConfig& c = *step.config;
  p.mlp_norm.Forward(step, weights, r->middle, r->mlp_norm, r->normed_middle);
  p.fc1.Forward(step, weights, r->normed_middle, r->fc1_output);
  ActivationForward(step, p, weights, *r);
  p.fc2.Forward(step, weights, r->activated, scratch.hidden_a);
  BiasDropoutAddForward(step.context, scratch.hidden_a, BiasOf(weights, p.fc2), r->middle, DrawHiddenMask(step, r->fc2_keep),
                        c.hidden_dropout, HiddenDropoutKind(c), step.precision, output);
}

void MlpBlockBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                      const LayerRecord& r, const Tensor& gradient) {
  const GptConfig& c = *step.config;
  const Tensor keep = c.hidden_dropout == 0.0 ? Tensor() : r.fc2_keep;
  BiasDropoutAddBackward(step.context, gradient, keep, c.hidden_dropout, HiddenDropoutKind(c), step.precision, scratch.hidden_a,
                         BiasGradOf(weights, p.fc2));
  p.fc2.Backward(step, weights, scratch.hidden_a, r.activated, scratch.d_activated, scratch.weight_grad);
  ActivationBackward(step, p, weights, r, scratch);
  if (p.fc1.bias >= 0) AddColumnSums(step.context, scratch.d_fc1, step.precision, BiasGradOf(weights, p.fc1));
  p.fc1.Backward(step, weights, scratch.d_fc1, r.normed_middle, scratch.hidden_b, scratch.weight_grad);
  p.mlp_norm.Backward(step, weights, scratch.hidden_b, r.middle, r.mlp_norm, gradient, gradient);
}

void AttentionBlockBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                            const LayerRecord& r, const Tensor& gradient) {
  const GptConfig& c = *step.config;
  const Tensor keep = c.hidden_dropout == 0.0 ? Tensor() : r.proj_keep;
  BiasDropoutAddBackward(step.context, gradient, keep, c.hidden_dropout, HiddenDropoutKind(c), step.precision, scratch.hidden_a,
                         BiasGradOf(weights, p.proj));
  p.proj.Backward(step, weights, scratch.hidden_a, r.context, scratch.d_context, scratch.weight_grad);
  Convert(step.context, scratch.d_context, step.precision, scratch.d_context);
  const Tensor attention_keep = c.attention_dropout == 0.0 ? Tensor() : r.attention_keep;
  AttentionBackward(step.context, scratch.d_context, r.qkv, attention_keep, r.probabilities, AttentionOptionsOf(step),
                    scratch.d_qkv, scratch.attention);
  PrepareHeadsBackward(step, p, weights, r, scratch.d_qkv);
  if (p.qkv.bias >= 0) AddColumnSums(step.context, scratch.d_qkv, step.precision, BiasGradOf(weights, p.qkv));
  p.qkv.Backward(step, weights, scratch.d_qkv, r.normed_input, scratch.hidden_b, scratch.weight_grad);
  p.input_norm.Backward(step, weights, scratch.hidden_b, r.input, r.input_norm, gradient, gradient);
}

}  // namespace

AttentionOptions AttentionOptionsOf(const Step& step) {
  const GptConfig& c = *step.config;
  return {.seq_length = step.seq_length,
          .batch = step.micro_batch_size,
          .heads = c.num_attention_heads,
          .groups = c.num_query_groups,
          .head_size = c.kv_channels,
          .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.kv_channels))),
          .window = c.attention_window,
          .dropout = c.attention_dropout,
          .softmax_in_fp32 = c.attention_softmax_in_fp32,
          .precision = step.precision};
}

LayerRecord LayerRecord::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const int64_t s = step.seq_length, b = step.micro_batch_size, h = c.hidden_size;
  const auto activation = [&](int64_t width) { return arena->Allocate(step.storage, {s, b, width}); };
  const auto mask = [&](bool wanted, const Shape& shape) { return wanted ? arena->Allocate(DType::kU8, shape) : Tensor(); };
  const Shape scores{b, c.num_attention_heads, s, s};
  LayerRecord r;
  r.input_norm = NormRecord::Allocate(arena, step);
  r.mlp_norm = NormRecord::Allocate(arena, step);
  r.normed_input = activation(h);
  r.projected = r.qkv = activation(LayoutOf(c).width());
  if (c.qk_layernorm) {
    r.projected = activation(LayoutOf(c).width());
    r.qk_rstd = arena->Allocate(DType::kF32, {s * b, c.num_attention_heads + c.num_query_groups});
  }
  r.attention_keep = mask(c.attention_dropout > 0.0, scores);
  r.probabilities = arena->Allocate(ProbabilityType(AttentionOptionsOf(step)), scores);
  r.context = activation(QueryWidth(c));
  r.proj_keep = mask(c.hidden_dropout > 0.0, {s, b, h});
  r.fc2_keep = mask(c.hidden_dropout > 0.0, {s, b, h});
  r.middle = activation(h);
  r.normed_middle = activation(h);
  r.fc1_output = activation(Fc1Width(c));
  r.activated = activation(c.ffn_hidden_size);
  return r;
}

LayerScratch LayerScratch::Allocate(Arena* arena, const Step& step, int threads) {
  const GptConfig& c = *step.config;
  const auto activation = [&](int64_t width) {
    return arena->Allocate(step.storage, {step.seq_length, step.micro_batch_size, width});
  };
  LayerScratch scratch;
  scratch.hidden_a = activation(c.hidden_size);
  scratch.hidden_b = activation(c.hidden_size);
  scratch.d_context = activation(QueryWidth(c));
  scratch.d_qkv = activation(LayoutOf(c).width());
  scratch.d_activated = scratch.d_fc1 = activation(c.ffn_hidden_size);
  if (Fc1Width(c) != c.ffn_hidden_size) scratch.d_fc1 = activation(Fc1Width(c));
  scratch.weight_grad =
      arena->Allocate(DType::kF32, {std::max({LayoutOf(c).width(), Fc1Width(c), QueryWidth(c)}) * c.hidden_size});
  scratch.attention = arena->Allocate(DType::kU8, {AttentionWorkspaceBytes(AttentionOptionsOf(step), step.storage, threads)});
  return scratch;
}

void TransformerLayerForward(const Step& step, const LayerParameters& parameters, const Weights& weights,
                             const LayerScratch& scratch, LayerRecord* record, const Tensor& output) {
  AttentionBlockForward(step, parameters, weights, scratch, record);
  MlpBlockForward(step, parameters, weights, scratch, record, output);
}

void TransformerLayerBackward(const Step& step, const LayerParameters& parameters, const Weights& weights,
                              const LayerScratch& scratch, const LayerRecord& record, const Tensor& gradient) {
  MlpBlockBackward(step, parameters, weights, scratch, record, gradient);
  AttentionBlockBackward(step, parameters, weights, scratch, record, gradient);
}

}  // namespace mbridge
