#include "engine/model/mamba.h"

#include <cmath>

#include "engine/model/norm.h"
#include "engine/ops/bias_add.h"
#include "engine/ops/causal_conv1d.h"
#include "engine/ops/gated_rms_norm.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/scale_columns.h"
#include "engine/ops/ssd_scan.h"

namespace mbridge {
namespace {

SsdScanOptions ScanOptionsOf(const Step& step) {
  const GptConfig& c = *step.config;
  return {.batch = step.micro_batch_size,
          .heads = c.mamba_num_heads,
          .head_dim = c.mamba_head_dim,
          .groups = c.mamba_num_groups,
          .state_dim = c.mamba_state_dim,
          .dt_min = static_cast<float>(c.mamba_dt_min),
          .dt_max = static_cast<float>(c.mamba_dt_max),
          .precision = step.precision};
}

int64_t NormGroups(const GptConfig& c) { return c.mamba_norm_groups > 0 ? c.mamba_norm_groups : c.mamba_num_groups; }

GatedRmsNormOptions NormOptionsOfMixer(const Step& step) {
  NormOptions norm = NormOptionsOf(step);
  norm.gamma_offset = 0.0f;
  return {.groups = NormGroups(*step.config), .norm_before_gate = step.config->mamba_norm_before_gate, .norm = norm};
}

// Width of x, B and C together.
int64_t ConvolutionWidth(const GptConfig& c) { return MambaInnerWidth(c) + 2 * c.mamba_num_groups * c.mamba_state_dim; }

// Columns of in_proj's output, or of its gradient.
Matrix Gate(const GptConfig& c, const Tensor& projected) { return ColumnsOf(AsMatrix(projected), 0, MambaInnerWidth(c)); }
Matrix Convolved(const GptConfig& c, const Tensor& projected) {
  return ColumnsOf(AsMatrix(projected), MambaInnerWidth(c), ConvolutionWidth(c));
}
Matrix TimeSteps(const GptConfig& c, const Tensor& projected) {
  return ColumnsOf(AsMatrix(projected), MambaInnerWidth(c) + ConvolutionWidth(c), c.mamba_num_heads);
}

SsdScanInputs ScanInputs(const GptConfig& c, const MambaParameters& p, const Weights& weights, const MambaRecord& r) {
  return {.xbc = AsMatrix(r.convolved),
          .dt = TimeSteps(c, r.projected),
          .a_log = weights.value(p.a_log),
          .d = weights.value(p.d),
          .dt_bias = weights.value(p.dt_bias)};
}

Tensor ValueOf(const Weights& weights, int index) { return index < 0 ? Tensor() : weights.value(index); }
Tensor GradOf(const Weights& weights, int index) { return index < 0 ? Tensor() : weights.main_grad(index); }

// x = x times the multipliers of the mixer's input and of its parts.
void Multiply(const Step& step, const Tensor& x) {
  const GptConfig& c = *step.config;
  if (c.mamba_in_multiplier == 1.0 && c.mamba_multipliers.empty()) return;
  const int64_t inner = MambaInnerWidth(c), states = c.mamba_num_groups * c.mamba_state_dim;
  ColumnFactors factors{.parts = 5, .widths = {inner, inner, states, states, c.mamba_num_heads}, .factors = {}};
  for (size_t i = 0; i < 5; ++i) {
    const double part = c.mamba_multipliers.empty() ? 1.0 : c.mamba_multipliers[i];
    factors.factors[i] = static_cast<float>(c.mamba_in_multiplier * part);
  }
  ScaleColumns(step.context, x, factors, step.precision, x);
}

}  // namespace

int64_t MambaInnerWidth(const GptConfig& c) { return c.mamba_num_heads * c.mamba_head_dim; }
int64_t MambaProjectionWidth(const GptConfig& c) { return MambaInnerWidth(c) + ConvolutionWidth(c) + c.mamba_num_heads; }

MambaParameters DeclareMamba(const GptConfig& c, const std::string& prefix,
                             const std::function<int(const ParameterDeclaration&)>& declare) {
  using Kind = InitRule::Kind;
  const int64_t inner = MambaInnerWidth(c), states = c.mamba_num_groups * c.mamba_state_dim, heads = c.mamba_num_heads;
  const InitRule normal{Kind::kModelParallelNormal, static_cast<float>(c.init_method_std)};
  const InitRule of_output{Kind::kModelParallelNormal, static_cast<float>(OutputInitStd(c))};
  const InitRule of_convolution{Kind::kUniform, 1.0f / std::sqrt(static_cast<float>(c.mamba_conv_kernel))};
  const std::vector<int64_t> parts{inner, inner, states, states, heads}, convolved{inner, states, states};
  const auto shard = [&](const char* name, const Shape& shape, const InitRule& rule, const std::vector<int64_t>& stripes = {}) {
    return declare({.name = prefix + name, .shape = shape, .rule = rule, .axis = 0, .stripes = stripes});
  };
  MambaParameters p;
  p.in_proj.split = LinearSplit::kColumns;
  p.in_proj.weight = shard("in_proj.weight", {MambaProjectionWidth(c), c.hidden_size}, normal, parts);
  if (c.add_bias_linear) p.in_proj.bias = shard("in_proj.bias", {MambaProjectionWidth(c)}, {}, parts);
  p.conv_weight = shard("conv1d.weight", {ConvolutionWidth(c), 1, c.mamba_conv_kernel}, of_convolution, convolved);
  if (c.mamba_conv_bias) p.conv_bias = shard("conv1d.bias", {ConvolutionWidth(c)}, of_convolution, convolved);
  p.dt_bias = shard("dt_bias", {heads}, {Kind::kMambaDt});
  p.a_log = shard("A_log", {heads}, {Kind::kMambaLog});
  p.d = shard("D", {heads}, {Kind::kConstant, 1.0f});
  if (c.mamba_rms_norm) p.norm = shard("norm.weight", {inner}, {Kind::kConstant, 1.0f});
  p.out_proj.split = LinearSplit::kRows;
  p.out_proj.weight =
      declare({.name = prefix + "out_proj.weight", .shape = {c.hidden_size, inner}, .rule = of_output, .axis = 1});
  if (c.add_bias_linear)
    p.out_proj.bias = declare({.name = prefix + "out_proj.bias", .shape = {c.hidden_size}, .rule = {}, .of_stream = true});
  return p;
}

MambaRecord MambaRecord::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const int64_t s = step.seq_length, b = step.micro_batch_size;
  const auto activation = [&](int64_t width) { return arena->Allocate(step.storage, {s, b, width}); };
  MambaRecord r;
  r.projected = activation(MambaProjectionWidth(c));
  r.convolved = activation(ConvolutionWidth(c));
  r.scanned = activation(MambaInnerWidth(c));
  if (c.mamba_rms_norm) r.rstd = arena->Allocate(DType::kF32, {s * b, NormGroups(c)});
  r.gated = activation(MambaInnerWidth(c));
  return r;
}

MambaScratch MambaScratch::Allocate(Arena* arena, const Step& step, int threads) {
  const GptConfig& c = *step.config;
  const int64_t s = step.seq_length, b = step.micro_batch_size;
  const auto activation = [&](int64_t width) { return arena->Allocate(step.storage, {s, b, width}); };
  MambaScratch scratch;
  scratch.d_gated = activation(MambaInnerWidth(c));
  scratch.d_convolved = activation(ConvolutionWidth(c));
  scratch.d_projected = activation(MambaProjectionWidth(c));
  scratch.hidden = arena->Allocate(step.storage, {step.stream_length(), b, c.hidden_size});
  scratch.workspace = arena->Allocate(DType::kU8, {SsdScanWorkspaceBytes(ScanOptionsOf(step), s, threads)});
  return scratch;
}

void MambaForward(const Step& step, const MambaParameters& p, const Weights& weights, const MambaScratch& scratch,
                  const MambaRecord& r, const Tensor& x) {
  const GptConfig& c = *step.config;
  p.in_proj.Forward(step, weights, x, r.projected);
  if (p.in_proj.bias >= 0) BiasAdd(step.context, r.projected, weights.value(p.in_proj.bias), step.precision);
  Multiply(step, r.projected);
  CausalConv1dForward(step.context, Convolved(c, r.projected), weights.value(p.conv_weight), ValueOf(weights, p.conv_bias),
                      step.micro_batch_size, step.precision, AsMatrix(r.convolved));
  SsdScanForward(step.context, ScanInputs(c, p, weights, r), ScanOptionsOf(step), r.scanned, scratch.workspace);
  GatedRmsNormForward(step.context, r.scanned, Gate(c, r.projected), ValueOf(weights, p.norm), NormOptionsOfMixer(step), r.gated,
                      r.rstd);
}

void MambaBackward(const Step& step, const MambaParameters& p, const Weights& weights, const MambaScratch& scratch,
                   const MambaRecord& r, const Tensor& x, const Tensor& dx, const Tensor& weight_grad) {
  const GptConfig& c = *step.config;
  const Tensor &d_inner = scratch.d_gated, &d_projected = scratch.d_projected;
  GatedRmsNormBackward(step.context, d_inner, r.scanned, Gate(c, r.projected), ValueOf(weights, p.norm), r.rstd,
                       NormOptionsOfMixer(step), d_inner, Gate(c, d_projected), GradOf(weights, p.norm));
  SsdScanBackward(step.context, d_inner, ScanInputs(c, p, weights, r), ScanOptionsOf(step), AsMatrix(scratch.d_convolved),
                  TimeSteps(c, d_projected), {weights.main_grad(p.a_log), weights.main_grad(p.d), weights.main_grad(p.dt_bias)},
                  scratch.workspace);
  CausalConv1dBackward(step.context, AsMatrix(scratch.d_convolved), Convolved(c, r.projected), weights.value(p.conv_weight),
                       ValueOf(weights, p.conv_bias), step.micro_batch_size, step.precision, Convolved(c, d_projected),
                       weights.main_grad(p.conv_weight), GradOf(weights, p.conv_bias));
  Multiply(step, d_projected);
  if (p.in_proj.bias >= 0) AddColumnSums(step.context, d_projected, step.precision, weights.main_grad(p.in_proj.bias));
  p.in_proj.Backward(step, weights, d_projected, x, dx, weight_grad);
}

void ValidateMamba(const GptConfig& c) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw EngineError(v1::REASON_INVALID_CONFIG, message);
  };
  const auto positive = [&](const char* field, int64_t value) {
    require(value > 0, fmt::format("model.{} is {}: at least 1 with a Mamba-2 mixer", field, value));
  };
  positive("mamba_state_dim", c.mamba_state_dim);
  positive("mamba_head_dim", c.mamba_head_dim);
  positive("mamba_num_groups", c.mamba_num_groups);
  positive("mamba_num_heads", c.mamba_num_heads);
  positive("mamba_conv_kernel", c.mamba_conv_kernel);
  require(c.mamba_conv_kernel <= kMostConvolutionTaps,
          fmt::format("model.mamba_conv_kernel is {}: at most {}", c.mamba_conv_kernel, kMostConvolutionTaps));
  require(c.mamba_num_heads % c.mamba_num_groups == 0,
          fmt::format("model.mamba_num_heads is {}: must be a multiple of model.mamba_num_groups = {}", c.mamba_num_heads,
                      c.mamba_num_groups));
  require(c.mamba_norm_groups >= 0 && MambaInnerWidth(c) % NormGroups(c) == 0,
          fmt::format("model.mamba_norm_groups is {}: must divide the {} elements of the mixer's output", NormGroups(c),
                      MambaInnerWidth(c)));
  require(c.mamba_dt_min >= 0 && (c.mamba_dt_max == 0 || c.mamba_dt_max >= c.mamba_dt_min),
          fmt::format("model.mamba_dt_min is {} and model.mamba_dt_max {}: 0 or more, the second at least the first",
                      c.mamba_dt_min, c.mamba_dt_max));
  require(c.mamba_multipliers.empty() || c.mamba_multipliers.size() == 5,
          fmt::format("model.mamba_multipliers has {} values: 5, for z, x, B, C and dt", c.mamba_multipliers.size()));
  require(c.mamba_in_multiplier > 0 && c.mamba_out_multiplier > 0,
          fmt::format("model.mamba_in_multiplier is {} and model.mamba_out_multiplier {}: above 0", c.mamba_in_multiplier,
                      c.mamba_out_multiplier));
  const auto unsupported = [](bool wanted, std::string_view what) {
    if (!wanted) return;
    throw EngineError(v1::REASON_UNSUPPORTED_MODEL, fmt::format("this engine does not build Mamba-2 mixers with {} yet", what));
  };
  unsupported(c.add_bias_linear && c.mamba_in_multiplier != 1, "biases and model.mamba_in_multiplier");
  unsupported(c.post_layernorm, "model.post_layernorm");
}

}  // namespace mbridge
