#include "engine/model/transformer_layer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/ops/bias_add.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/geglu.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/mla_heads.h"
#include "engine/ops/rms_norm.h"
#include "engine/ops/rotary.h"
#include "engine/ops/scale.h"
#include "engine/ops/scale_columns.h"
#include "engine/ops/sigmoid_gate.h"
#include "engine/ops/squared_relu.h"
#include "engine/ops/swiglu.h"

namespace mbridge {
namespace {

Tensor BiasOf(const Weights& weights, const Linear& linear) { return linear.bias < 0 ? Tensor() : weights.value(linear.bias); }
Tensor BiasGradOf(const Weights& weights, const Linear& linear) {
  return linear.bias < 0 ? Tensor() : weights.main_grad(linear.bias);
}

DropoutKind HiddenDropoutKind(const GptConfig& c) { return c.bias_dropout_fusion ? DropoutKind::kCompiled : DropoutKind::kEager; }
GeluKind GeluKindOf(const GptConfig& c) {
  if (c.bias_activation_fusion) return GeluKind::kTanhFused;
  const bool tanh = c.activation == ActivationKind::kGeluTanh || c.activation == ActivationKind::kGegluTanh;
  return tanh ? GeluKind::kTanh : GeluKind::kErf;
}
SwiGluKind SwiGluKindOf(const GptConfig& c) { return c.bias_activation_fusion ? SwiGluKind::kFused : SwiGluKind::kEager; }

// The mask of a hidden dropout; empty where there is none.
Tensor DrawHiddenMask(const Step& step, const Tensor& keep) {
  const GptConfig& c = *step.config;
  if (!step.training() || c.hidden_dropout == 0.0) return {};
  PhiloxStream* stream = step.hidden_dropout_stream();
  if (c.bias_dropout_fusion) {
    const MaskPosition position = PositionOf(step, stream);
    const int64_t seed = DrawCompiledSeed(stream);
    if (position.device_words == nullptr) {
      DrawCompiledDropoutMask(step.context, seed, c.hidden_dropout, keep);
    } else {
      DrawCompiledDropoutMaskAt(step.context, position, c.hidden_dropout, keep);
    }
  } else {
    DrawEagerMask(step, stream, c.hidden_dropout, keep);
  }
  return keep;
}

Tensor DrawAttentionMask(const Step& step, const Tensor& keep) {
  const GptConfig& c = *step.config;
  if (!step.training() || c.attention_dropout == 0.0) return {};
  DrawEagerMask(step, &step.streams->model_parallel, c.attention_dropout, keep);
  return keep;
}

QkvLayout LayoutOf(const GptConfig& c) {
  if (c.multi_latent_attention) return MlaLayoutOf(c).qkv();
  return {c.num_attention_heads, c.num_query_groups, c.kv_channels};
}

AttentionOptions CoreOptions(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r) {
  AttentionOptions options = AttentionOptionsOf(step, p.layer);
  if (p.sinks >= 0) options.sinks = {weights.value(p.sinks), r.sink_probabilities, weights.main_grad(p.sinks)};
  return options;
}

// fill(sums) gives this rank's sums where a norm spans what several ranks hold.
template <class Fill> QkNormOptions QkNormOptionsOf(const Step& step, const LayerRecord& r, Fill&& fill) {
  const GptConfig& c = *step.config;
  const QkNormScope scope = c.qk_norm_over_projection ? QkNormScope::kProjection : QkNormScope::kHead;
  QkNormOptions options{.layout = LayoutOf(c), .scope = scope, .norm = NormOptionsOf(step)};
  if (r.qk_sums.empty()) return options;
  fill(options);
  SumOverRanks(step, r.qk_sums);
  options.sums = r.qk_sums;
  options.ranks = step.tensor_parallel.size();
  return options;
}

// Turns the queries and keys of a layer, or gradients back.
void Turn(const Step& step, int64_t layer, const Tensor& qkv, RotaryDirection direction) {
  const GptConfig& c = *step.config;
  if (!HasRope(c, layer)) return;
  const bool local = c.rotary_base_local > 0 && AttentionWindowOf(c, layer) > 0;
  Rotary(step.context, qkv, local ? step.rotary_local_cosine : step.rotary_cosine,
         local ? step.rotary_local_sine : step.rotary_sine, LayoutOf(c),
         c.rotary_interleaved ? RotaryPairs::kInterleaved : RotaryPairs::kHalves, direction, step.precision);
}

// x = round(x factor), if that is another.
void ScaleBy(const Step& step, double factor, const Tensor& x) {
  if (factor != 1.0) Scale(step.context, x, static_cast<float>(factor), step.precision, x);
}

// x, of the first MLP layer's width, with its gate half multiplied.
void ScaleGate(const Step& step, const Tensor& x) {
  const GptConfig& c = *step.config;
  if (c.mlp_gate_multiplier == 1.0) return;
  const ColumnFactors factors{
      .parts = 2, .widths = {c.ffn_hidden_size, c.ffn_hidden_size}, .factors = {static_cast<float>(c.mlp_gate_multiplier), 1.0f}};
  ScaleColumns(step.context, x, factors, step.precision, x);
}

// record->qkv from record->projected.
void PrepareHeads(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r) {
  if (step.config->qk_layernorm) {
    const QkNormOptions options =
        QkNormOptionsOf(step, r, [&](const QkNormOptions& own) { QkNormSquares(step.context, r.projected, own, r.qk_sums); });
    QkNormForward(step.context, r.projected, weights.value(p.query_gamma), weights.value(p.key_gamma), options, r.qkv, r.qk_rstd);
  }
  ScaleBy(step, step.config->attention_in_multiplier, r.qkv);
  Turn(step, p.layer, r.qkv, RotaryDirection::kForward);
}

// d_qkv: of record.qkv on entry, of record.projected on return.
void PrepareHeadsBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r,
                          const Tensor& d_qkv) {
  Turn(step, p.layer, d_qkv, RotaryDirection::kBackward);
  ScaleBy(step, step.config->attention_in_multiplier, d_qkv);
  if (step.config->qk_layernorm) {
    const Tensor &query_gamma = weights.value(p.query_gamma), &key_gamma = weights.value(p.key_gamma);
    const QkNormOptions options = QkNormOptionsOf(step, r, [&](const QkNormOptions& own) {
      QkNormDots(step.context, d_qkv, r.projected, query_gamma, key_gamma, r.qk_rstd, own, r.qk_sums);
    });
    QkNormBackward(step.context, d_qkv, r.projected, query_gamma, key_gamma, r.qk_rstd, options, weights.main_grad(p.query_gamma),
                   weights.main_grad(p.key_gamma));
  }
}

// Where the maker of a layer's input takes its largest value; empty if nobody asks.
Tensor MaximumOf(const Step& step, const NarrowInput& input) {
  return input.input_measured ? step.narrow->StartMaximum(input.scales) : Tensor();
}

// Whether the maker of the gradient of a layer's output takes its largest value.
bool Measures(const Step& step, const Linear& linear) { return linear.narrow >= 0 && step.narrow->TakesMaxima(); }

void ActivationForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r) {
  const GptConfig& c = *step.config;
  const Tensor bias = BiasOf(weights, p.fc1);
  switch (c.activation) {
    case ActivationKind::kSwiGlu:
      if (r.fc2_input.input_measured) {
        return SwiGluForwardWithAmax(step.context, r.fc1_output, bias, SwiGluKindOf(c), step.precision, r.activated,
                                     MaximumOf(step, r.fc2_input));
      }
      return SwiGluForward(step.context, r.fc1_output, bias, SwiGluKindOf(c), step.precision, r.activated);
    case ActivationKind::kGeglu:
    case ActivationKind::kGegluTanh:
      return GegluForward(step.context, r.fc1_output, bias, GeluKindOf(c), step.precision, r.activated);
    case ActivationKind::kSquaredRelu: return SquaredReluForward(step.context, r.fc1_output, bias, step.precision, r.activated);
    case ActivationKind::kGelu:
    case ActivationKind::kGeluTanh:
      return BiasGeluForward(step.context, r.fc1_output, bias, GeluKindOf(c), step.precision, r.activated);
    case ActivationKind::kQuickGeglu: ThrowEngineError("a plain MLP with a gated quick GELU");
  }
}

// scratch.d_fc1 from scratch.d_activated.
void ActivationBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerRecord& r,
                        const LayerScratch& scratch) {
  const GptConfig& c = *step.config;
  const Tensor bias = BiasOf(weights, p.fc1), &dy = scratch.d_activated, &dx = scratch.d_fc1;
  switch (c.activation) {
    case ActivationKind::kSwiGlu:
      if (Measures(step, p.fc1) && c.mlp_gate_multiplier == 1.0) {
        return SwiGluBackwardWithAmax(step.context, dy, r.fc1_output, bias, SwiGluKindOf(c), step.precision, dx,
                                      step.narrow->StartGradientMaximum(dx));
      }
      return SwiGluBackward(step.context, dy, r.fc1_output, bias, SwiGluKindOf(c), step.precision, dx);
    case ActivationKind::kGeglu:
    case ActivationKind::kGegluTanh:
      return GegluBackward(step.context, dy, r.fc1_output, bias, GeluKindOf(c), step.precision, dx);
    case ActivationKind::kSquaredRelu: return SquaredReluBackward(step.context, dy, r.fc1_output, bias, step.precision, dx);
    case ActivationKind::kGelu:
    case ActivationKind::kGeluTanh:
      return BiasGeluBackward(step.context, dy, r.fc1_output, bias, GeluKindOf(c), step.precision, dx);
    case ActivationKind::kQuickGeglu: ThrowEngineError("a plain MLP with a gated quick GELU");
  }
}

// The end of a block: its last layer, and what is added to the residual stream.
struct BlockEnd {
  const Linear& linear;  // Without weight in a block of experts, which has its product already.
  const Norm& post_norm;
  const NormRecord& post_record;
  const Tensor& input;   // Of the linear layer.
  const Tensor& output;  // Of the linear layer with its bias, kept for the post norm's backward; empty without post norm.
  const Tensor& keep;    // Dropout mask; empty without dropout.
  double multiplier;     // Of what is added.
  const NarrowInput& narrow_input;
};

BlockEnd MlpEnd(const Step& step, const LayerParameters& p, const LayerRecord& r) {
  const GptConfig& c = *step.config;
  return {p.fc2,
          p.mlp_post_norm,
          r.mlp_post_norm,
          r.activated,
          r.mlp_output,
          r.fc2_keep,
          c.residual_multiplier * c.mlp_out_multiplier,
          r.fc2_input};
}

bool HasBothMixers(const LayerParameters& p) { return p.mamba.present() && p.proj.weight >= 0; }

// Where both mixers end, their sum is there already.
BlockEnd MixerEnd(const Step& step, const LayerParameters& p, const LayerRecord& r) {
  static const Linear kNone;
  const GptConfig& c = *step.config;
  const bool both = HasBothMixers(p), mamba = p.mamba.present(), delta = p.delta.present();
  const double own = both || delta ? 1.0 : mamba ? c.mamba_out_multiplier : c.attention_out_multiplier;
  const Tensor& attention = c.attention_output_gate ? r.gated_context : r.context;
  return {both    ? kNone
          : mamba ? p.mamba.out_proj
          : delta ? p.delta.out_proj
                  : p.proj,
          p.attention_post_norm,
          r.attention_post_norm,
          mamba   ? r.mamba.gated
          : delta ? r.delta.gated
                  : attention,
          r.attention_output,
          r.proj_keep,
          c.residual_multiplier * own,
          r.proj_input};
}

// x = round(x + bias) for the output of a layer.
void FinishLinear(const Step& step, const Weights& weights, const Linear& linear, const Tensor& x) {
  if (linear.bias >= 0) {
    BiasAdd(step.context, x, BiasOf(weights, linear), step.precision);
  } else {
    Convert(step.context, x, step.precision, x);
  }
}

// Where a block's last product goes.
const Tensor& ProductOf(const Step& step, const BlockEnd& end, const LayerScratch& scratch) {
  return step.config->post_layernorm ? end.output : scratch.hidden_a;
}

// output = residual + dropout(multiplier post_norm(input W^T + bias)). A plain sum is left to the norm that follows where
// `leaving` is given.
void BlockEndForward(const Step& step, const BlockEnd& end, const Weights& weights, const LayerScratch& scratch,
                     const Tensor& residual, const Tensor& output, OpenSum* leaving) {
  const GptConfig& c = *step.config;
  const Tensor& product = ProductOf(step, end, scratch);
  if (end.linear.weight >= 0) end.linear.Forward(step, weights, end.input, product, end.narrow_input);
  const bool bias_apart = c.post_layernorm || end.multiplier != 1.0;
  if (bias_apart) FinishLinear(step, weights, end.linear, product);
  if (c.post_layernorm) end.post_norm.Forward(step, weights, product, end.post_record, scratch.hidden_a);
  ScaleBy(step, end.multiplier, scratch.hidden_a);
  const Tensor bias = bias_apart ? Tensor() : BiasOf(weights, end.linear), keep = DrawHiddenMask(step, end.keep);
  if (leaving != nullptr && bias.empty() && keep.empty() && c.pre_layernorm && NormsTakeSums(step)) {
    *leaving = {residual, scratch.hidden_a};
    return;
  }
  BiasDropoutAddForward(step.context, scratch.hidden_a, bias, residual, keep, c.hidden_dropout, HiddenDropoutKind(c),
                        step.precision, output);
}

// d_input from the residual stream's gradient. Returns the gradient of the block's last product: scratch.hidden_a, or `gradient`
// itself where nothing comes between.
Tensor BlockEndBackward(const Step& step, const BlockEnd& end, const Weights& weights, const LayerScratch& scratch,
                        const Tensor& gradient, const Tensor& d_input) {
  const GptConfig& c = *step.config;
  const Tensor keep = c.hidden_dropout == 0.0 ? Tensor() : end.keep, bias_grad = BiasGradOf(weights, end.linear);
  const bool bias_apart = c.post_layernorm || end.multiplier != 1.0, joint_bias = !bias_apart && !bias_grad.empty();
  Tensor d_output = keep.empty() ? gradient : scratch.hidden_a;
  if (!keep.empty() || joint_bias) {
    BiasDropoutAddBackward(step.context, gradient, keep, c.hidden_dropout, HiddenDropoutKind(c), step.precision, d_output,
                           joint_bias ? bias_grad : Tensor());
  }
  if (end.multiplier != 1.0) {
    Scale(step.context, d_output, static_cast<float>(end.multiplier), step.precision, scratch.hidden_a);
    d_output = scratch.hidden_a;
  }
  if (c.post_layernorm) {
    end.post_norm.Backward(step, weights, d_output, end.output, end.post_record, {}, scratch.hidden_a);
    d_output = scratch.hidden_a;
  }
  if (bias_apart && !bias_grad.empty()) AddColumnSums(step.context, d_output, step.precision, bias_grad);
  if (end.linear.weight >= 0)
    end.linear.Backward(step, weights, d_output, end.input, d_input, scratch.weight_grad, end.narrow_input);
  return d_output;
}

// The gradient of a block's input joins that of the residual stream. d_input: of the norm's output, or without norm of its input.
void JoinGradient(const Step& step, const Norm& norm, const Weights& weights, const Tensor& d_input, const Tensor& x,
                  const NormRecord& record, const Tensor& gradient) {
  if (step.config->pre_layernorm)
    return norm.Backward(step, weights, d_input, x, record, gradient, gradient, StreamGradientMaximum(step, gradient));
  BiasDropoutAddForward(step.context, d_input, {}, gradient, {}, 0.0, DropoutKind::kEager, step.precision, gradient);
}

const Tensor& AttentionInput(const Step& step, const LayerRecord& r) {
  return step.config->pre_layernorm ? r.normed_input : r.input;
}
const Tensor& MlpInput(const Step& step, const LayerRecord& r) { return step.config->pre_layernorm ? r.normed_middle : r.middle; }

// Visits, group after group, the parts of a row of linear_qkv's output with output gates (queries, gates, key and value) and
// where they go: copy(wide column, column of qkv or -1, column of the gates or -1, width).
template <class Copy> void ForEachGatedPart(const GptConfig& c, Copy&& copy) {
  const QkvLayout layout = LayoutOf(c);
  const int64_t queries = layout.heads_per_group() * layout.head_size;
  for (int64_t group = 0; group < layout.groups; ++group) {
    const int64_t wide = group * (layout.group_width() + queries), plain = group * layout.group_width();
    copy(wide, plain, -1, queries);
    copy(wide + queries, -1, group * queries, queries);
    copy(wide + 2 * queries, plain + queries, -1, layout.group_width() - queries);
  }
}

void SplitOutputGate(const Step& step, const Tensor& wide, const Tensor& qkv, const Tensor& gate) {
  ForEachGatedPart(*step.config, [&](int64_t from, int64_t plain, int64_t gates, int64_t width) {
    CopyColumns(step.context, wide, from, plain < 0 ? gate : qkv, plain < 0 ? gates : plain, width, step.precision);
  });
}

void JoinOutputGate(const Step& step, const Tensor& qkv, const Tensor& gate, const Tensor& wide) {
  ForEachGatedPart(*step.config, [&](int64_t to, int64_t plain, int64_t gates, int64_t width) {
    CopyColumns(step.context, plain < 0 ? gate : qkv, plain < 0 ? gates : plain, wide, to, width, step.precision);
  });
}

// r->context from the block's input, with an output gate also r->gated_context.
void AttentionForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                      LayerRecord* r) {
  if (p.mla.present()) {
    MlaForward(step, p.mla, weights, scratch.mla, r->mla, AttentionInput(step, *r), r->qkv);
  } else if (step.config->attention_output_gate) {
    p.qkv.Forward(step, weights, AttentionInput(step, *r), scratch.wide_qkv, r->qkv_input);
    SplitOutputGate(step, scratch.wide_qkv, r->projected, r->output_gate);
    PrepareHeads(step, p, weights, *r);
  } else {
    p.qkv.Forward(step, weights, AttentionInput(step, *r), r->projected, r->qkv_input);
    FinishLinear(step, weights, p.qkv, r->projected);
    PrepareHeads(step, p, weights, *r);
  }
  if (step.training()) r->attention_stream = step.streams->model_parallel;
  const Tensor keep = DrawAttentionMask(step, r->attention_keep);
  CoreAttentionForward(step, CoreOptions(step, p, weights, *r), r->qkv, keep, r->attention, r->context, scratch.attention);
  if (step.config->attention_output_gate)
    SigmoidGateForward(step.context, r->context, r->output_gate, step.precision, r->gated_context);
}

// scratch.hidden_a = what attention and Mamba give together.
void JoinMixers(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                const LayerRecord& r) {
  const Tensor &sum = scratch.hidden_a, &other = scratch.hidden_b;
  p.proj.Forward(step, weights, r.context, sum, r.proj_input);
  FinishLinear(step, weights, p.proj, sum);
  ScaleBy(step, step.config->attention_out_multiplier, sum);
  p.mamba.out_proj.Forward(step, weights, r.mamba.gated, other);
  FinishLinear(step, weights, p.mamba.out_proj, other);
  ScaleBy(step, step.config->mamba_out_multiplier, other);
  BiasDropoutAddForward(step.context, other, {}, sum, {}, 0.0, DropoutKind::kEager, step.precision, sum);
}

// Whether backward needs something of a block's last product, or of its making.
bool NeedsProduct(const Step& step, const LayerParameters& p) {
  return step.config->post_layernorm || IsLowPrecisionLayer(*step.config, p.layer);
}

void MixerBlockForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                       LayerRecord* r, const Tensor& output, const OpenSum& entering, OpenSum* leaving) {
  if (step.config->pre_layernorm) {
    p.input_norm.ForwardOfSum(step, weights, entering, r->input, r->input_norm, r->normed_input, MaximumOf(step, r->qkv_input));
  }
  if (p.proj.weight >= 0) AttentionForward(step, p, weights, scratch, r);
  if (p.mamba.present()) MambaForward(step, p.mamba, weights, scratch.mamba, r->mamba, AttentionInput(step, *r));
  if (p.delta.present()) GatedDeltaForward(step, p.delta, weights, r->delta, AttentionInput(step, *r));
  if (output.empty() && !NeedsProduct(step, p)) {  // A layer without MLP, again.
    DrawHiddenMask(step, r->proj_keep);
    return;
  }
  if (HasBothMixers(p)) JoinMixers(step, p, weights, scratch, *r);
  BlockEndForward(step, MixerEnd(step, p, *r), weights, scratch, r->input, output.empty() ? scratch.hidden_b : output, leaving);
}

// Experts' record with other places for what is summed over microbatches.
MoeRecord WithoutSums(const MoeRecord& record, const LayerScratch& scratch) {
  MoeRecord again = record;
  again.load = scratch.unused_load;
  again.balance_loss = scratch.unused_loss;
  return again;
}

void MlpBlockForward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                     LayerRecord* r, const Tensor& output, const OpenSum& entering, OpenSum* leaving) {
  if (step.config->pre_layernorm) {
    p.mlp_norm.ForwardOfSum(step, weights, entering, r->middle, r->mlp_norm, r->normed_middle, MaximumOf(step, r->fc1_input));
  }
  if (p.moe.present()) {
    MoeForward(step, p.moe, weights, scratch.moe, r->moe, MlpInput(step, *r), ProductOf(step, MlpEnd(step, p, *r), scratch));
  } else {
    p.fc1.Forward(step, weights, MlpInput(step, *r), r->fc1_output, r->fc1_input);
    ScaleGate(step, r->fc1_output);
    ActivationForward(step, p, weights, *r);
  }
  if (output.empty() && !NeedsProduct(step, p)) {
    DrawHiddenMask(step, r->fc2_keep);
  } else {
    BlockEndForward(step, MlpEnd(step, p, *r), weights, scratch, r->middle, output.empty() ? scratch.hidden_b : output, leaving);
  }
}

// What selective recomputation did not keep.
void MlpBlockAgain(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                   const LayerRecord& r) {
  const RecomputeModules& modules = step.config->recompute_modules;
  if (modules.layernorm && step.config->pre_layernorm) p.mlp_norm.Forward(step, weights, r.middle, r.mlp_norm, r.normed_middle);
  if (p.moe.present()) {
    if (modules.moe) {
      MoeForward(step, p.moe, weights, scratch.moe, WithoutSums(r.moe, scratch), MlpInput(step, r), scratch.hidden_b);
    } else if (modules.moe_act) {
      MoeActivation(step, r.moe);
    }
  } else if (modules.mlp) {
    p.fc1.Forward(step, weights, MlpInput(step, r), r.fc1_output);
    ScaleGate(step, r.fc1_output);
    ActivationForward(step, p, weights, r);
  }
}

void MixerBlockAgain(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                     const LayerRecord& r) {
  const GptConfig& c = *step.config;
  const RecomputeModules& modules = c.recompute_modules;
  if (modules.layernorm && c.pre_layernorm) p.input_norm.Forward(step, weights, r.input, r.input_norm, r.normed_input);
  if (modules.mla_up_proj && p.mla.present())
    MlaUpForward(step, p.mla, weights, scratch.mla, r.mla, AttentionInput(step, r), r.qkv);
  if (!modules.core_attention || p.proj.weight < 0 || r.attention.probabilities.empty()) return;
  PhiloxStream& stream = step.streams->model_parallel;
  const PhiloxStream now = std::exchange(stream, r.attention_stream);
  const Tensor keep = DrawAttentionMask(step, r.attention_keep);
  stream = now;
  CoreAttentionForward(step, CoreOptions(step, p, weights, r), r.qkv, keep, r.attention, r.context, scratch.attention);
}

void MlpBlockBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                      const LayerRecord& r, const Tensor& gradient) {
  const Tensor d_output = BlockEndBackward(step, MlpEnd(step, p, r), weights, scratch, gradient, scratch.d_activated);
  if (p.moe.present()) {
    MoeBackward(step, p.moe, weights, scratch.moe, r.moe, MlpInput(step, r), d_output, scratch.hidden_b);
  } else {
    ActivationBackward(step, p, weights, r, scratch);
    ScaleGate(step, scratch.d_fc1);
    if (p.fc1.bias >= 0) AddColumnSums(step.context, scratch.d_fc1, step.precision, BiasGradOf(weights, p.fc1));
    p.fc1.Backward(step, weights, scratch.d_fc1, MlpInput(step, r), scratch.hidden_b, scratch.weight_grad, r.fc1_input);
  }
  JoinGradient(step, p.mlp_norm, weights, scratch.hidden_b, r.middle, r.mlp_norm, gradient);
}

// scratch.hidden_b = the gradient of the block's input, from scratch.d_context.
void AttentionBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                       const LayerRecord& r) {
  const bool gate = step.config->attention_output_gate;
  Convert(step.context, scratch.d_context, step.precision, scratch.d_context);
  if (gate) {
    SigmoidGateBackward(step.context, scratch.d_context, r.context, r.output_gate, step.precision, scratch.d_context,
                        scratch.d_output_gate);
  }
  const Tensor attention_keep = step.config->attention_dropout == 0.0 ? Tensor() : r.attention_keep;
  CoreAttentionBackward(step, CoreOptions(step, p, weights, r), scratch.d_context, r.qkv, attention_keep, r.context, r.attention,
                        scratch.d_qkv, scratch.attention);
  if (p.mla.present()) {
    MlaBackward(step, p.mla, weights, scratch.mla, r.mla, AttentionInput(step, r), scratch.d_qkv, scratch.hidden_b,
                scratch.weight_grad);
    return;
  }
  PrepareHeadsBackward(step, p, weights, r, scratch.d_qkv);
  if (p.qkv.bias >= 0) AddColumnSums(step.context, scratch.d_qkv, step.precision, BiasGradOf(weights, p.qkv));
  if (gate) JoinOutputGate(step, scratch.d_qkv, scratch.d_output_gate, scratch.wide_qkv);
  p.qkv.Backward(step, weights, gate ? scratch.wide_qkv : scratch.d_qkv, AttentionInput(step, r), scratch.hidden_b,
                 scratch.weight_grad, r.qkv_input);
}

// From the gradient of JoinMixers' sum to scratch.d_context and scratch.mamba.d_gated.
void PartMixers(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                const LayerRecord& r, const Tensor& d_sum) {
  const Tensor& gradient = scratch.hidden_b;
  const auto part = [&](const Linear& linear, double multiplier, const Tensor& input, const NarrowInput& narrow_input,
                        const Tensor& d_input) {
    Scale(step.context, d_sum, static_cast<float>(multiplier), step.precision, gradient);
    if (linear.bias >= 0) AddColumnSums(step.context, gradient, step.precision, BiasGradOf(weights, linear));
    linear.Backward(step, weights, gradient, input, d_input, scratch.weight_grad, narrow_input);
  };
  part(p.proj, step.config->attention_out_multiplier, r.context, r.proj_input, scratch.d_context);
  part(p.mamba.out_proj, step.config->mamba_out_multiplier, r.mamba.gated, {}, scratch.mamba.d_gated);
}

void MixerBlockBackward(const Step& step, const LayerParameters& p, const Weights& weights, const LayerScratch& scratch,
                        const LayerRecord& r, const Tensor& gradient) {
  const bool both = HasBothMixers(p), mamba = p.mamba.present(), delta = p.delta.present();
  const Tensor& d_input_of_end = mamba ? scratch.mamba.d_gated : delta ? scratch.delta.d_gated : scratch.d_context;
  const Tensor d_output = BlockEndBackward(step, MixerEnd(step, p, r), weights, scratch, gradient, d_input_of_end);
  if (both) PartMixers(step, p, weights, scratch, r, d_output);
  if (p.proj.weight >= 0) AttentionBackward(step, p, weights, scratch, r);
  if (mamba) {
    const Tensor& d_input = both ? scratch.mamba.hidden : scratch.hidden_b;
    MambaBackward(step, p.mamba, weights, scratch.mamba, r.mamba, AttentionInput(step, r), d_input, scratch.weight_grad);
  }
  if (delta) {
    GatedDeltaBackward(step, p.delta, weights, scratch.delta, r.delta, AttentionInput(step, r), scratch.hidden_b,
                       scratch.weight_grad);
  }
  if (both) {
    BiasDropoutAddForward(step.context, scratch.mamba.hidden, {}, scratch.hidden_b, {}, 0.0, DropoutKind::kEager, step.precision,
                          scratch.hidden_b);
  }
  JoinGradient(step, p.input_norm, weights, scratch.hidden_b, r.input, r.input_norm, gradient);
}

}  // namespace

MaskPosition PositionOf(const Step& step, const PhiloxStream* stream) {
  if (step.recorded == nullptr) return *stream;
  const bool model_parallel = stream == &step.streams->model_parallel;
  const uint64_t begin = model_parallel ? step.recorded->model_parallel_offset : step.recorded->default_offset;
  return {step.recorded->words + (model_parallel ? 2 : 0), stream->offset - begin};
}

Tensor StreamGradientMaximum(const Step& step, const Tensor& gradient) {
  const bool measured = step.narrow != nullptr && step.narrow->TakesMaxima() && step.config->pre_layernorm &&
                        !step.tensor_parallel.sequence_parallel;
  return measured ? step.narrow->StartGradientMaximum(gradient) : Tensor();
}

void DrawEagerMask(const Step& step, PhiloxStream* stream, double p, const Tensor& keep) {
  DrawEagerDropoutMask(step.context, PositionOf(step, stream), step.streams->sm_count, p,
                       static_cast<int>(SizeOf(step.precision)), keep);
  stream->offset += CudaDrawAdvance(keep.size(), step.streams->sm_count);
}

AttentionOptions AttentionOptionsOf(const Step& step, int64_t layer) {
  const GptConfig& c = *step.config;
  double scale = c.softmax_scale > 0 ? c.softmax_scale : 1.0 / std::sqrt(static_cast<double>(LayoutOf(c).head_size));
  if (c.mscale_all_dim != 0 && c.yarn_rotary_scaling_factor > 1) {
    const double m = 0.1 * c.mscale_all_dim * std::log(c.yarn_rotary_scaling_factor) + 1.0;
    scale *= m * m;
  }
  scale *= c.key_multiplier;
  return {.seq_length = step.seq_length,
          .batch = step.micro_batch_size,
          .heads = c.num_attention_heads,
          .groups = c.num_query_groups,
          .head_size = LayoutOf(c).head_size,
          .value_size = LayoutOf(c).value_size,
          .scale = static_cast<float>(scale),
          .soft_cap = static_cast<float>(c.attn_logit_softcapping),
          .window = AttentionWindowOf(c, layer),
          .dropout = c.attention_dropout,
          .softmax_in_fp32 = c.attention_softmax_in_fp32,
          .precision = step.precision};
}

LayerRecord LayerRecord::Allocate(Arena* arena, Arena* again, const Step& step, int64_t layer) {
  const GptConfig& c = *step.config;
  const RecomputeModules modules = c.recompute == Recompute::kSelective ? c.recompute_modules : RecomputeModules();
  const auto of = [&](bool recomputed) { return recomputed ? again : arena; };
  const int64_t s = step.seq_length, b = step.micro_batch_size;
  const Shape stream{step.stream_length(), b, c.hidden_size};
  const auto activation_of = [&](Arena* from, int64_t width) { return from->Allocate(step.storage, {s, b, width}); };
  const auto activation = [&](int64_t width) { return activation_of(arena, width); };
  const auto mask = [&](bool wanted, const Shape& shape) { return wanted ? arena->Allocate(DType::kU8, shape) : Tensor(); };
  const bool mlp = HasMlp(c, layer), mixer = MixerOf(c, layer) != MixerKind::kNone;
  const bool narrow = IsLowPrecisionLayer(c, layer), whole = !step.tensor_parallel.sequence_parallel;
  const bool narrow_qkv = narrow && HasAttention(c, layer) && !c.multi_latent_attention;
  const bool narrow_mlp = narrow && mlp && !IsMoeLayer(c, layer);
  // Backward has no use for the inputs of the column-split layers, and none for the MLP's second one.
  const bool codes = narrow && step.narrow->KeepsCodes(whole), codes_of_fc2 = narrow_mlp && step.narrow->KeepsCodes(true);
  LayerRecord r;
  if (narrow_qkv) r.qkv_input = step.narrow->AllocateInput(arena, s * b, c.hidden_size, whole);
  r.qkv_input.input_measured = narrow_qkv && whole && c.pre_layernorm && step.narrow->TakesMaxima();
  if (narrow && HasAttention(c, layer)) r.proj_input = step.narrow->AllocateInput(arena, s * b, ContextWidth(c), true);
  if (narrow_mlp) {
    r.fc1_input = step.narrow->AllocateInput(arena, s * b, c.hidden_size, whole);
    r.fc2_input = step.narrow->AllocateInput(arena, s * b, c.ffn_hidden_size, true);
    const bool measured = c.activation == ActivationKind::kSwiGlu && step.narrow->TakesMaxima();
    r.fc2_input.input_measured = measured;
    r.fc1_input.input_measured = whole && c.pre_layernorm && step.narrow->TakesMaxima();
  }
  if (c.pre_layernorm && mixer) {
    r.input_norm = NormRecord::Allocate(arena, step);
    const bool only_qkv = narrow_qkv && !HasMamba(c, layer);
    if (!codes || !only_qkv) r.normed_input = of(modules.layernorm)->Allocate(step.storage, stream);
  }
  if (c.pre_layernorm && mlp) {
    r.mlp_norm = NormRecord::Allocate(arena, step);
    if (!codes || !narrow_mlp) r.normed_middle = of(modules.layernorm)->Allocate(step.storage, stream);
  }
  if (c.post_layernorm) {
    r.attention_post_norm = NormRecord::Allocate(arena, step);
    r.mlp_post_norm = NormRecord::Allocate(arena, step);
    r.attention_output = arena->Allocate(step.storage, stream);
    r.mlp_output = arena->Allocate(step.storage, stream);
  }
  if (HasAttention(c, layer)) {
    r.projected = r.qkv = activation_of(of(modules.mla_up_proj && c.multi_latent_attention), LayoutOf(c).width());
    if (c.multi_latent_attention) r.mla = MlaRecord::Allocate(arena, step);
    if (c.attention_sinks) r.sink_probabilities = arena->Allocate(DType::kF32, {b, c.num_attention_heads, s});
    if (c.qk_layernorm) {
      const int64_t norms = c.qk_norm_over_projection ? 2 : c.num_attention_heads + c.num_query_groups;
      r.projected = activation(LayoutOf(c).width());
      r.qk_rstd = arena->Allocate(DType::kF32, {s * b, norms});
      if (c.qk_norm_over_projection && step.tensor_parallel.size() > 1) r.qk_sums = arena->Allocate(DType::kF32, {s * b, 2});
    }
    const AttentionOptions options = AttentionOptionsOf(step, layer);
    Arena* const scores = of(modules.core_attention && !UsesFlashAttention(step, options));
    if (c.attention_dropout > 0.0) r.attention_keep = scores->Allocate(DType::kU8, {b, c.num_attention_heads, s, s});
    r.attention = CoreAttentionRecord::Allocate(scores, step, options);
    r.context = activation(ContextWidth(c));
    if (c.attention_output_gate) {
      r.output_gate = activation(ContextWidth(c));
      r.gated_context = activation(ContextWidth(c));
    }
  }
  if (HasGatedDelta(c, layer)) r.delta = GatedDeltaRecord::Allocate(arena, step);
  if (HasMamba(c, layer)) r.mamba = MambaRecord::Allocate(arena, step);
  r.proj_keep = mask(mixer && c.hidden_dropout > 0.0, stream);
  r.fc2_keep = mask(mlp && c.hidden_dropout > 0.0, stream);
  if (mixer && mlp) r.middle = arena->Allocate(step.storage, stream);
  if (IsMoeLayer(c, layer)) {
    r.moe = MoeRecord::Allocate(arena, again, step);
  } else if (mlp) {
    r.fc1_output = activation_of(of(modules.mlp), Fc1Width(c));
    if (!codes_of_fc2) r.activated = activation_of(of(modules.mlp), c.ffn_hidden_size);
  }
  return r;
}

namespace {

// Attention's workspace for the layer that wants most.
int64_t AttentionBytes(const Step& step, int threads) {
  int64_t most = 0;
  for (int64_t layer = 0; layer < step.config->num_layers; ++layer) {
    if (!HasAttention(*step.config, layer)) continue;
    most = std::max(most, CoreAttentionWorkspaceBytes(step, AttentionOptionsOf(step, layer), threads));
  }
  return most;
}

}  // namespace

void LayerRecord::ShareScratch(const Step& step, const LayerScratch& scratch) {
  if (step.config->pre_layernorm && normed_input.empty()) normed_input = scratch.hidden_b;
  if (step.config->pre_layernorm && normed_middle.empty()) normed_middle = scratch.hidden_b;
  if (activated.empty()) activated = scratch.d_activated;
}

LayerScratch LayerScratch::Allocate(Arena* arena, const Step& step, int threads) {
  const GptConfig& c = *step.config;
  const auto activation = [&](int64_t width) {
    return arena->Allocate(step.storage, {step.seq_length, step.micro_batch_size, width});
  };
  LayerScratch scratch;
  const Shape stream{step.stream_length(), step.micro_batch_size, c.hidden_size};
  scratch.hidden_a = arena->Allocate(step.storage, stream);
  scratch.hidden_b = arena->Allocate(step.storage, stream);
  const bool dense = CountLayers(c, HasMlp) > CountLayers(c, IsMoeLayer);
  int64_t largest = 0;  // Elements of a weight.
  if (CountLayers(c, HasAttention) > 0) {
    scratch.d_context = activation(ContextWidth(c));
    scratch.d_qkv = activation(LayoutOf(c).width());
    scratch.attention = arena->Allocate(DType::kU8, {AttentionBytes(step, threads)});
    largest = std::max(ContextWidth(c), c.multi_latent_attention ? 0 : QkvWidth(c)) * c.hidden_size;
  }
  if (dense) {
    scratch.d_activated = scratch.d_fc1 = activation(c.ffn_hidden_size);
    if (Fc1Width(c) != c.ffn_hidden_size) scratch.d_fc1 = activation(Fc1Width(c));
    largest = std::max(largest, Fc1Width(c) * c.hidden_size);
  }
  if (CountLayers(c, HasGatedDelta) > 0) {
    scratch.delta = GatedDeltaScratch::Allocate(arena, step);
    largest = std::max(largest, GatedDeltaWidth(c) * c.hidden_size);
  }
  if (c.attention_output_gate) {
    scratch.wide_qkv = activation(QkvWidth(c));
    scratch.d_output_gate = activation(ContextWidth(c));
  }
  if (CountLayers(c, HasMamba) > 0) {
    scratch.mamba = MambaScratch::Allocate(arena, step, threads);
    largest = std::max(largest, MambaProjectionWidth(c) * c.hidden_size);
  }
  if (c.multi_latent_attention) {
    scratch.mla = MlaScratch::Allocate(arena, step);
    largest = std::max(largest, LargestMlaWeight(c));
  }
  if (!step.fuse_gradients()) scratch.weight_grad = arena->Allocate(DType::kF32, {largest});
  if (c.num_moe_experts > 0) {
    scratch.moe = MoeScratch::Allocate(arena, step);
    scratch.unused_load = arena->Allocate(DType::kF32, {c.num_moe_experts});
    scratch.unused_loss = arena->Allocate(DType::kF32, {1});
  }
  return scratch;
}

void TransformerLayerForward(const Step& step, const LayerParameters& parameters, const Weights& weights,
                             const LayerScratch& scratch, LayerRecord* record, const Tensor& output, const OpenSum& entering,
                             OpenSum* leaving) {
  OpenSum inside;
  if (!parameters.has_mixer) record->middle = record->input;
  if (parameters.has_mixer) {
    MixerBlockForward(step, parameters, weights, scratch, record, parameters.has_mlp ? record->middle : output, entering,
                      parameters.has_mlp ? &inside : leaving);
  }
  if (parameters.has_mlp)
    MlpBlockForward(step, parameters, weights, scratch, record, output, parameters.has_mixer ? inside : entering, leaving);
}

void TransformerLayerAgain(const Step& step, const LayerParameters& parameters, const Weights& weights,
                           const LayerScratch& scratch, const LayerRecord& record, const Tensor& output, const OpenSum& entering,
                           OpenSum* leaving) {
  LayerRecord again = record;
  again.moe = WithoutSums(record.moe, scratch);
  TransformerLayerForward(step, parameters, weights, scratch, &again, output, entering, leaving);
}

void TransformerLayerBackward(const Step& step, const LayerParameters& parameters, const Weights& weights,
                              const LayerScratch& scratch, const LayerRecord& record, const Tensor& gradient) {
  const bool selective = step.config->recompute == Recompute::kSelective;
  if (parameters.has_mlp) {
    if (selective) MlpBlockAgain(step, parameters, weights, scratch, record);
    MlpBlockBackward(step, parameters, weights, scratch, record, gradient);
  }
  if (parameters.has_mixer) {
    if (selective) MixerBlockAgain(step, parameters, weights, scratch, record);
    MixerBlockBackward(step, parameters, weights, scratch, record, gradient);
  }
}

}  // namespace mbridge
