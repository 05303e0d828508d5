#include "engine/model/gated_delta_net.h"

#include <algorithm>
#include <cmath>

#include "engine/model/norm.h"
#include "engine/ops/causal_conv1d.h"
#include "engine/ops/convert.h"
#include "engine/ops/gated_rms_norm.h"

namespace mbridge {
namespace {

// Of every value head by itself, with gammas as they are.
GatedRmsNormOptions OutNormOptions(const Step& step) {
  GatedRmsNormOptions options{
      .groups = DeltaLayoutOf(*step.config).value_heads, .norm_before_gate = true, .norm = NormOptionsOf(step)};
  options.norm.gamma_offset = 0.0f;
  return options;
}

Matrix MixedColumns(const Step& step, const Tensor& projected) {
  return ColumnsOf(AsMatrix(projected), 0, DeltaLayoutOf(*step.config).width());
}

Matrix GateColumns(const Step& step, const Tensor& projected) {
  const DeltaLayout layout = DeltaLayoutOf(*step.config);
  return ColumnsOf(AsMatrix(projected), layout.width(), layout.value_width());
}

int64_t HeadColumn(const GptConfig& c) { return DeltaLayoutOf(c).width() + DeltaLayoutOf(c).value_width(); }

}  // namespace

DeltaLayout DeltaLayoutOf(const GptConfig& c) {
  return {c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim};
}

int64_t GatedDeltaWidth(const GptConfig& c) { return HeadColumn(c) + 2 * c.linear_num_value_heads; }

GatedDeltaParameters DeclareGatedDelta(const GptConfig& c, const std::string& prefix,
                                       const std::function<int(const ParameterDeclaration&)>& declare) {
  const DeltaLayout layout = DeltaLayoutOf(c);
  const int64_t keys = layout.key_width(), values = layout.value_width(), heads = layout.value_heads;
  const auto conv_bound = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.linear_conv_kernel_dim)));
  GatedDeltaParameters p;
  p.in_proj.split = LinearSplit::kColumns;
  p.in_proj.weight = declare({.name = prefix + "in_proj.weight",
                              .shape = {GatedDeltaWidth(c), c.hidden_size},
                              .rule = {InitRule::Kind::kModelParallelNormal, static_cast<float>(c.init_method_std)},
                              .axis = 0,
                              .stripes = {keys, keys, values, values, heads, heads}});
  p.conv = declare({.name = prefix + "conv1d.weight",
                    .shape = {layout.width(), 1, c.linear_conv_kernel_dim},
                    .rule = {InitRule::Kind::kUniform, conv_bound},
                    .axis = 0,
                    .stripes = {keys, keys, values}});
  p.dt_bias = declare({.name = prefix + "dt_bias", .shape = {heads}, .rule = {InitRule::Kind::kConstant, 1.0f}, .axis = 0});
  p.a_log = declare({.name = prefix + "A_log", .shape = {heads}, .rule = {InitRule::Kind::kMambaLog}, .axis = 0});
  p.out_norm =
      declare({.name = prefix + "out_norm.weight", .shape = {layout.value_size}, .rule = {InitRule::Kind::kConstant, 1.0f}});
  p.out_proj.split = LinearSplit::kRows;
  p.out_proj.weight = declare({.name = prefix + "out_proj.weight",
                               .shape = {c.hidden_size, values},
                               .rule = {InitRule::Kind::kModelParallelNormal, static_cast<float>(OutputInitStd(c))},
                               .axis = 1});
  return p;
}

GatedDeltaRecord GatedDeltaRecord::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const DeltaLayout layout = DeltaLayoutOf(c);
  const int64_t s = step.seq_length, b = step.micro_batch_size, heads = layout.value_heads;
  const auto activation = [&](int64_t width) { return arena->Allocate(step.storage, {s, b, width}); };
  GatedDeltaRecord r;
  r.projected = activation(GatedDeltaWidth(c));
  r.mixed = activation(layout.width());
  r.log_decay = arena->Allocate(DType::kF32, {s, b, heads});
  r.beta = arena->Allocate(DType::kF32, {s, b, heads});
  r.states = arena->Allocate(DType::kF32, {b, heads, DeltaChunks(s), layout.key_size * layout.value_size});
  r.read = activation(layout.value_width());
  r.rstd = arena->Allocate(DType::kF32, {s * b, heads});
  r.gated = activation(layout.value_width());
  return r;
}

GatedDeltaScratch GatedDeltaScratch::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const DeltaLayout layout = DeltaLayoutOf(c);
  const int64_t s = step.seq_length, b = step.micro_batch_size;
  const auto activation = [&](int64_t width) { return arena->Allocate(step.storage, {s, b, width}); };
  GatedDeltaScratch scratch;
  scratch.d_projected = activation(GatedDeltaWidth(c));
  scratch.d_mixed = activation(layout.width());
  scratch.d_log_decay = arena->Allocate(DType::kF32, {s, b, layout.value_heads});
  scratch.d_beta = arena->Allocate(DType::kF32, {s, b, layout.value_heads});
  scratch.d_gated = activation(layout.value_width());
  return scratch;
}

void GatedDeltaForward(const Step& step, const GatedDeltaParameters& p, const Weights& weights, const GatedDeltaRecord& r,
                       const Tensor& x) {
  const GptConfig& c = *step.config;
  p.in_proj.Forward(step, weights, x, r.projected);
  CausalConv1dForward(step.context, MixedColumns(step, r.projected), weights.value(p.conv), {}, step.micro_batch_size,
                      step.precision, AsMatrix(r.mixed));
  DeltaGatesForward(step.context, r.projected, HeadColumn(c), weights.value(p.a_log), weights.value(p.dt_bias), step.precision,
                    r.log_decay, r.beta);
  GatedDeltaRuleForward(step.context, r.mixed, r.log_decay, r.beta, DeltaLayoutOf(c), step.precision, r.read,
                        step.training() ? r.states : Tensor());
  GatedRmsNormForward(step.context, r.read, GateColumns(step, r.projected), weights.value(p.out_norm), OutNormOptions(step),
                      r.gated, r.rstd);
}

void GatedDeltaBackward(const Step& step, const GatedDeltaParameters& p, const Weights& weights, const GatedDeltaScratch& scratch,
                        const GatedDeltaRecord& r, const Tensor& x, const Tensor& dx, const Tensor& weight_grad) {
  const GptConfig& c = *step.config;
  const Tensor& d_read = scratch.d_gated;
  GatedRmsNormBackward(step.context, d_read, r.read, GateColumns(step, r.projected), weights.value(p.out_norm), r.rstd,
                       OutNormOptions(step), d_read, GateColumns(step, scratch.d_projected), weights.main_grad(p.out_norm));
  GatedDeltaRuleBackward(step.context, d_read, r.mixed, r.log_decay, r.beta, r.states, DeltaLayoutOf(c), step.precision,
                         scratch.d_mixed, scratch.d_log_decay, scratch.d_beta);
  DeltaGatesBackward(step.context, scratch.d_log_decay, scratch.d_beta, r.projected, HeadColumn(c), weights.value(p.a_log),
                     weights.value(p.dt_bias), step.precision, scratch.d_projected, weights.main_grad(p.a_log),
                     weights.main_grad(p.dt_bias));
  CausalConv1dBackward(step.context, AsMatrix(scratch.d_mixed), MixedColumns(step, r.projected), weights.value(p.conv), {},
                       step.micro_batch_size, step.precision, MixedColumns(step, scratch.d_projected), weights.main_grad(p.conv),
                       {});
  p.in_proj.Backward(step, weights, scratch.d_projected, x, dx, weight_grad);
}

void ValidateGatedDelta(const GptConfig& c) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw EngineError(v1::REASON_INVALID_CONFIG, message);
  };
  const auto positive = [&](const char* field, int64_t value) {
    require(value > 0, fmt::format("model.{} is {}: at least 1 in layers with a gated delta net", field, value));
  };
  positive("linear_num_key_heads", c.linear_num_key_heads);
  positive("linear_num_value_heads", c.linear_num_value_heads);
  positive("linear_key_head_dim", c.linear_key_head_dim);
  positive("linear_value_head_dim", c.linear_value_head_dim);
  require(c.linear_num_value_heads % c.linear_num_key_heads == 0,
          fmt::format("model.linear_num_value_heads is {}: a multiple of model.linear_num_key_heads = {}",
                      c.linear_num_value_heads, c.linear_num_key_heads));
  require(c.linear_conv_kernel_dim > 0 && c.linear_conv_kernel_dim <= kMostConvolutionTaps,
          fmt::format("model.linear_conv_kernel_dim is {}: 1 to {}", c.linear_conv_kernel_dim, kMostConvolutionTaps));
  if (c.add_bias_linear) {
    throw EngineError(v1::REASON_UNSUPPORTED_MODEL, "this engine does not build a gated delta net with biases yet");
  }
}

}  // namespace mbridge
