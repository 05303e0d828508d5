#include "engine/model/moe.h"

#include <algorithm>

#include "engine/ops/bias_add.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/expert_activation.h"
#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/grouped_gemm.h"
#include "engine/ops/swiglu.h"

namespace mbridge {
namespace {

// Where the experts' weight gradients are rounded before they join the main gradients.
DType GradientPrecision(const Step& step) { return step.fuse_gradients() ? DType::kF32 : step.precision; }

DType RouterPrecision(const Step& step) { return step.config->moe_router_fp32 ? DType::kF32 : step.precision; }

ExpertActivationOptions ExpertActivationOf(const Step& step) {
  const GptConfig& c = *step.config;
  const bool quick = c.activation == ActivationKind::kQuickGeglu;
  return {.gate = quick ? GateKind::kQuickGelu : GateKind::kSilu,
          .clamp = static_cast<float>(c.activation_clamp),
          .linear_offset = static_cast<float>(c.glu_linear_offset),
          .fused = c.bias_activation_fusion,
          .precision = step.precision,
          .router_precision = RouterPrecision(step)};
}

SwiGluKind SharedActivation(const GptConfig& c) { return c.bias_activation_fusion ? SwiGluKind::kFused : SwiGluKind::kEager; }

int64_t TokensOf(const Step& step) { return step.seq_length * step.micro_batch_size; }

bool HasBalanceLoss(const GptConfig& c) { return c.moe_load_balancing != LoadBalancing::kNone && c.moe_aux_loss_coeff > 0; }

// `tensor` as F32: itself, or converted into the beginning of `copy`.
Tensor AsF32(const Step& step, const Tensor& tensor, const Tensor& copy) {
  if (tensor.dtype == DType::kF32) return tensor;
  if (tensor.size() > copy.size()) ThrowEngineError("{} values do not fit a copy of {}", tensor.size(), copy.size());
  const Tensor wide{copy.data, DType::kF32, copy.device, tensor.shape};
  Convert(step.context, tensor, DType::kF32, wide);
  return wide;
}

// The E tensors from a first index; none for -1.
std::span<const Tensor> Values(const Step& step, const Weights& weights, int first) {
  if (first < 0) return {};
  return weights.values(first, static_cast<int>(step.config->num_moe_experts));
}
std::span<const Tensor> Grads(const Step& step, const Weights& weights, int first) {
  if (first < 0) return {};
  return weights.main_grads(first, static_cast<int>(step.config->num_moe_experts));
}

void RouteTokens(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch, const MoeRecord& r,
                 const Tensor& x) {
  const GptConfig& c = *step.config;
  const Tensor input = AsF32(step, x, scratch.input_f32), weight = AsF32(step, weights.value(p.router), scratch.weight_f32);
  Gemm(step.context, AsMatrix(input), AsMatrix(weight), AsMatrix(r.logits), {.transpose_b = true});
  if (p.router_bias >= 0) {
    const Tensor bias = AsF32(step, weights.value(p.router_bias), scratch.weight_f32.Rows(0, 1));
    BiasAdd(step.context, r.logits, bias, RouterPrecision(step));
  }
  const RouterOptions options = RouterOptionsOf(step);
  RouterForward(step.context, r.logits, p.expert_bias < 0 ? Tensor() : weights.value(p.expert_bias), options, r.scores, r.experts,
                r.probabilities);
  SortByExpert(step.context, r.experts, r.rows);
  if (!step.training()) return;
  if (HasBalanceLoss(c)) {
    RouterBalanceLoss(step.context, r.scores, options, static_cast<float>(c.moe_aux_loss_coeff), step.grad_scale, r.balance_loss,
                      r.slopes);
  }
  if (p.expert_bias >= 0) AddExpertLoad(step.context, r.rows, r.load);
}

void SharedForward(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch,
                   const MoeRecord& r, const Tensor& x) {
  p.shared_fc1.Forward(step, weights, x, r.shared_fc1_output);
  SwiGluForward(step.context, r.shared_fc1_output, {}, SharedActivation(*step.config), step.precision, r.shared_activated);
  if (p.shared_gate < 0) {
    p.shared_fc2.Forward(step, weights, r.shared_activated, scratch.hidden);
    return;
  }
  p.shared_fc2.Forward(step, weights, r.shared_activated, r.shared_output);
  Gemm(step.context, AsMatrix(x), AsMatrix(weights.value(p.shared_gate)), AsMatrix(r.shared_gate), {.transpose_b = true});
  SharedGateForward(step.context, r.shared_output, r.shared_gate, step.precision, scratch.hidden);
}

// What every rank computes alike and only one adds to a sum over the ranks.
bool AddsReplicated(const Step& step) { return step.tensor_parallel.rank() == 0; }

// dx = round(dx + round(dx_part)).
void AddInputGradient(const Step& step, const Tensor& part, const Tensor& dx) {
  BiasDropoutAddForward(step.context, part, {}, dx, {}, 0.0, DropoutKind::kCompiled, step.precision, dx);
}

// Adds to dx.
void SharedBackward(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch,
                    const MoeRecord& r, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  Tensor d_output = dy;
  if (p.shared_gate >= 0) {
    const int64_t tokens = TokensOf(step);
    const Tensor d_gate_logits = scratch.d_logits.View({scratch.d_logits.size()}).Rows(0, tokens).View({tokens, 1});
    d_output = scratch.hidden;
    SharedGateBackward(step.context, dy, r.shared_output, r.shared_gate, step.precision, d_output, d_gate_logits);
    SumOverRanks(step, d_gate_logits);
    const Tensor input = AsF32(step, x, scratch.input_f32),
                 weight = AsF32(step, weights.value(p.shared_gate), scratch.weight_f32);
    const Tensor gradient{scratch.weight_grad.data, DType::kF32, scratch.weight_grad.device, weight.shape};
    Gemm(step.context, AsMatrix(d_gate_logits), AsMatrix(input), AsMatrix(gradient), {.transpose_a = true});
    AddGradient(step.context, gradient, step.precision, weights.main_grad(p.shared_gate));
    const Tensor part = scratch.sorted_a.Rows(0, tokens);
    Gemm(step.context, AsMatrix(d_gate_logits), AsMatrix(weight), AsMatrix(part), {});
    if (AddsReplicated(step)) AddInputGradient(step, part, dx);
  }
  p.shared_fc2.Backward(step, weights, d_output, r.shared_activated, scratch.shared_d_activated, scratch.weight_grad);
  SwiGluBackward(step.context, scratch.shared_d_activated, r.shared_fc1_output, {}, SharedActivation(*step.config),
                 step.precision, scratch.shared_d_fc1);
  p.shared_fc1.Backward(step, weights, scratch.shared_d_fc1, x, scratch.hidden, scratch.weight_grad);
  AddInputGradient(step, scratch.hidden, dx);
}

// scratch.d_probabilities, and dx through the experts.
void ExpertsBackward(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch,
                     const MoeRecord& r, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  const Context& context = step.context;
  const Tensor& offsets = r.rows.offsets;
  GatherRows(context, dy, r.rows, scratch.sorted_a);
  GroupedGemmInputGradient(context, scratch.sorted_a, Values(step, weights, p.fc2), offsets, scratch.d_activated);
  GroupedGemmWeightGradient(context, scratch.sorted_a, r.activated, offsets, GradientPrecision(step), Grads(step, weights, p.fc2),
                            scratch.weight_grad);
  ExpertActivationBackward(context, scratch.d_activated, r.fc1_output, r.rows, r.probabilities, ExpertActivationOf(step),
                           scratch.d_fc1, scratch.d_probabilities);
  if (p.fc1_bias >= 0) {
    // The whole bias is on every rank; d_logits is not needed yet and takes what is not to be counted again.
    const Tensor elsewhere{scratch.d_logits.data, DType::kF32, scratch.d_logits.device, scratch.d_probabilities.shape};
    ExpertBiasBackward(context, scratch.sorted_a, Values(step, weights, p.fc2_bias), r.rows, r.probabilities, step.precision,
                       Grads(step, weights, p.fc2_bias), AddsReplicated(step) ? scratch.d_probabilities : elsewhere);
    ExpertBiasBackward(context, scratch.d_fc1, Values(step, weights, p.fc1_bias), r.rows, {}, step.precision,
                       Grads(step, weights, p.fc1_bias), {});
  }
  GatherRows(context, x, r.rows, scratch.sorted_a);
  GroupedGemmWeightGradient(context, scratch.d_fc1, scratch.sorted_a, offsets, GradientPrecision(step),
                            Grads(step, weights, p.fc1), scratch.weight_grad);
  GroupedGemmInputGradient(context, scratch.d_fc1, Values(step, weights, p.fc1), offsets, scratch.sorted_b);
  SumRows(context, scratch.sorted_b, r.rows, {}, step.precision, dx);
  SumOverRanks(step, scratch.d_probabilities);
}

// Adds to dx.
void RouterBackwardAll(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch,
                       const MoeRecord& r, const Tensor& x, const Tensor& dx) {
  const GptConfig& c = *step.config;
  RouterAuxiliary auxiliary;
  if (HasBalanceLoss(c)) auxiliary.slopes = r.slopes;
  auxiliary.z_slope = static_cast<float>(2 * c.moe_z_loss_coeff * step.grad_scale / static_cast<double>(TokensOf(step)));
  RouterBackward(step.context, scratch.d_probabilities, r.logits, r.scores, r.experts, RouterOptionsOf(step), auxiliary,
                 scratch.d_logits);
  const Tensor input = AsF32(step, x, scratch.input_f32), weight = AsF32(step, weights.value(p.router), scratch.weight_f32);
  const Tensor gradient{scratch.weight_grad.data, DType::kF32, scratch.weight_grad.device, weight.shape};
  Gemm(step.context, AsMatrix(scratch.d_logits), AsMatrix(input), AsMatrix(gradient), {.transpose_a = true});
  AddGradient(step.context, gradient, step.precision, weights.main_grad(p.router));
  if (p.router_bias >= 0) AddColumnSums(step.context, scratch.d_logits, RouterPrecision(step), weights.main_grad(p.router_bias));
  if (!AddsReplicated(step)) return;
  Gemm(step.context, AsMatrix(scratch.d_logits), AsMatrix(weight), AsMatrix(scratch.hidden), {});
  AddInputGradient(step, scratch.hidden, dx);
}

}  // namespace

RouterOptions RouterOptionsOf(const Step& step) {
  const GptConfig& c = *step.config;
  int64_t group_experts = c.moe_router_group_experts;
  if (group_experts == 0 && c.moe_router_group_topk > 0)
    group_experts = std::max<int64_t>(1, c.moe_router_topk / c.moe_router_group_topk);
  return {.score = c.moe_router_score,
          .topk = c.moe_router_topk,
          .groups = c.moe_router_num_groups,
          .group_topk = c.moe_router_group_topk,
          .group_experts = group_experts,
          .scaling = static_cast<float>(c.moe_router_topk_scaling_factor),
          .precision = RouterPrecision(step)};
}

MoeParameters DeclareMoe(const GptConfig& c, const std::string& prefix,
                         const std::function<int(const ParameterDeclaration&)>& declare) {
  const int64_t h = c.hidden_size, n = c.moe_ffn_hidden_size, count = c.num_moe_experts;
  const auto in_std = static_cast<float>(c.init_method_std), out_std = static_cast<float>(OutputInitStd(c));
  MoeParameters p;
  p.router = declare({.name = prefix + "router.weight", .shape = {count, h}, .rule = {InitRule::Kind::kCpuNormal, in_std}});
  if (c.add_bias_linear) p.router_bias = declare({.name = prefix + "router.bias", .shape = {count}});
  if (c.moe_router_enable_expert_bias) {
    p.expert_bias = declare({.name = prefix + "router.expert_bias", .shape = {count}, .trainable = false});
  }
  const auto experts = [&](const char* name, ParameterDeclaration parameter, int64_t turn) {
    int first = -1;
    for (int64_t e = 0; e < count; ++e) {
      parameter.name = fmt::format("{}experts.{}{}", prefix, name, e);
      parameter.rule.turn = 2 * e + turn;  // Megatron-LM draws expert by expert.
      const int index = declare(parameter);
      if (e == 0) first = index;
    }
    return first;
  };
  const InitRule::Kind normal = InitRule::Kind::kExpertNormal;
  p.fc1 = experts("linear_fc1.weight", {.shape = {2 * n, h}, .rule = {normal, in_std}, .axis = 0, .stripes = {n, n}}, 0);
  p.fc2 = experts("linear_fc2.weight", {.shape = {h, n}, .rule = {normal, out_std}, .axis = 1}, 1);
  if (c.add_bias_linear) {
    p.fc1_bias = experts("linear_fc1.bias", {.shape = {2 * n}, .axis = 0, .stripes = {n, n}}, 0);
    p.fc2_bias = experts("linear_fc2.bias", {.shape = {h}}, 0);
  }
  const int64_t shared = c.moe_shared_expert_intermediate_size;
  if (shared == 0) return p;
  const InitRule::Kind dense = InitRule::Kind::kModelParallelNormal;
  const std::string name = prefix + "shared_experts.";
  p.shared_fc1.weight = declare({.name = name + "linear_fc1.weight",
                                 .shape = {2 * shared, h},
                                 .rule = {dense, in_std},
                                 .axis = 0,
                                 .stripes = {shared, shared}});
  p.shared_fc2.weight = declare({.name = name + "linear_fc2.weight", .shape = {h, shared}, .rule = {dense, out_std}, .axis = 1});
  if (c.moe_shared_expert_gate) {
    p.shared_gate = declare({.name = name + "gate_weight", .shape = {1, h}, .rule = {InitRule::Kind::kCpuNormal, in_std}});
  }
  return p;
}

MoeRecord MoeRecord::Allocate(Arena* kept, Arena* again, const Step& step) {
  const GptConfig& c = *step.config;
  const RecomputeModules modules = c.recompute == Recompute::kSelective ? c.recompute_modules : RecomputeModules();
  Arena* const arena = modules.moe ? again : kept;
  const int64_t tokens = TokensOf(step), count = c.num_moe_experts, k = c.moe_router_topk, rows = tokens * k;
  const int64_t n = c.moe_ffn_hidden_size, shared = c.moe_shared_expert_intermediate_size;
  const auto activation = [&](int64_t of, int64_t width) { return arena->Allocate(step.storage, {of, width}); };
  const auto floats = [&](const Shape& shape) { return arena->Allocate(DType::kF32, shape); };
  MoeRecord r;
  r.logits = floats({tokens, count});
  r.scores = floats({tokens, count});
  r.experts = arena->Allocate(DType::kI32, {tokens, k});
  r.probabilities = floats({tokens, k});
  r.rows = {arena->Allocate(DType::kI32, {count + 1}), arena->Allocate(DType::kI32, {rows}),
            arena->Allocate(DType::kI32, {rows})};
  r.fc1_output = activation(rows, 2 * n);
  r.activated = (modules.moe_act ? again : arena)->Allocate(step.storage, {rows, n});
  if (shared > 0) {
    r.shared_fc1_output = activation(tokens, 2 * shared);
    r.shared_activated = activation(tokens, shared);
  }
  if (c.moe_shared_expert_gate) {
    r.shared_output = activation(tokens, c.hidden_size);
    r.shared_gate = floats({tokens, 1});
  }
  r.slopes = floats({c.moe_load_balancing == LoadBalancing::kSequence ? step.micro_batch_size : 1, count});
  r.balance_loss = kept->Allocate(DType::kF32, {1});
  r.load = kept->Allocate(DType::kF32, {count});
  return r;
}

MoeScratch MoeScratch::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const int64_t tokens = TokensOf(step), h = c.hidden_size, rows = tokens * c.moe_router_topk, n = c.moe_ffn_hidden_size;
  const int64_t shared = c.moe_shared_expert_intermediate_size;
  const auto activation = [&](int64_t of, int64_t width) { return arena->Allocate(step.storage, {of, width}); };
  const auto floats = [&](const Shape& shape) { return arena->Allocate(DType::kF32, shape); };
  MoeScratch scratch;
  scratch.sorted_a = activation(rows, h);
  scratch.sorted_b = activation(rows, h);
  scratch.d_activated = activation(rows, n);
  scratch.d_fc1 = activation(rows, 2 * n);
  scratch.d_probabilities = floats({tokens, c.moe_router_topk});
  scratch.d_logits = floats({tokens, c.num_moe_experts});
  scratch.hidden = activation(tokens, h);
  if (step.tensor_parallel.sequence_parallel) {
    scratch.whole_x = arena->Allocate(step.storage, {step.seq_length, step.micro_batch_size, h});
    scratch.whole_dy = arena->Allocate(step.storage, {step.seq_length, step.micro_batch_size, h});
  }
  if (shared > 0) {
    scratch.shared_d_activated = activation(tokens, shared);
    scratch.shared_d_fc1 = activation(tokens, 2 * shared);
  }
  if (step.storage != DType::kF32) {
    scratch.input_f32 = floats({tokens, h});
    scratch.weight_f32 = floats({c.num_moe_experts, h});
  }
  scratch.weight_grad = floats({std::max({2 * n, 2 * shared, c.num_moe_experts}) * h});
  return scratch;
}

void MoeActivation(const Step& step, const MoeRecord& r) {
  ExpertActivationForward(step.context, r.fc1_output, r.rows, r.probabilities, ExpertActivationOf(step), r.activated);
}

void MoeForward(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch, const MoeRecord& r,
                const Tensor& own_x, const Tensor& output) {
  const Context& context = step.context;
  const Tensor x = GatherSequenceInto(step, own_x, scratch.whole_x), partial = PartialSum(step, output);
  RouteTokens(step, p, weights, scratch, r, x);
  GatherRows(context, x, r.rows, scratch.sorted_a);
  GroupedGemm(context, scratch.sorted_a, Values(step, weights, p.fc1), r.rows.offsets, r.fc1_output);
  if (p.fc1_bias >= 0) {
    ExpertBiasAdd(context, r.fc1_output, Values(step, weights, p.fc1_bias), r.rows, {}, step.precision);
  }
  MoeActivation(step, r);
  GroupedGemm(context, r.activated, Values(step, weights, p.fc2), r.rows.offsets, scratch.sorted_b);
  if (p.fc2_bias >= 0 && AddsReplicated(step)) {
    ExpertBiasAdd(context, scratch.sorted_b, Values(step, weights, p.fc2_bias), r.rows, r.probabilities, step.precision);
  }
  const bool shared = p.shared_fc1.weight >= 0;
  if (shared) SharedForward(step, p, weights, scratch, r, x);
  SumRows(context, scratch.sorted_b, r.rows, shared ? scratch.hidden : Tensor(), step.precision, partial);
  SumPartial(step, partial, output);
}

void MoeBackward(const Step& step, const MoeParameters& p, const Weights& weights, const MoeScratch& scratch, const MoeRecord& r,
                 const Tensor& own_x, const Tensor& own_dy, const Tensor& dx) {
  const Tensor x = GatherSequenceInto(step, own_x, scratch.whole_x), dy = GatherSequenceInto(step, own_dy, scratch.whole_dy);
  const Tensor partial = PartialSum(step, dx);
  ExpertsBackward(step, p, weights, scratch, r, x, dy, partial);
  RouterBackwardAll(step, p, weights, scratch, r, x, partial);
  if (p.shared_fc1.weight >= 0) SharedBackward(step, p, weights, scratch, r, x, dy, partial);
  SumPartial(step, partial, dx);
}

void ValidateMoe(const GptConfig& c) {
  if (c.num_moe_experts == 0) return;
  const auto require = [](bool holds, std::string_view message) {
    if (!holds) throw EngineError(v1::REASON_INVALID_CONFIG, std::string(message));
  };
  const auto unsupported = [](bool wanted, std::string_view what) {
    if (wanted) throw EngineError(v1::REASON_UNSUPPORTED_MODEL, fmt::format("this engine does not build {} yet", what));
  };
  require(c.num_moe_experts >= 2, fmt::format("model.num_moe_experts is {}: at least 2", c.num_moe_experts));
  require(c.moe_ffn_hidden_size > 0, fmt::format("model.moe_ffn_hidden_size is {}: at least 1", c.moe_ffn_hidden_size));
  require(c.moe_router_topk >= 1 && c.moe_router_topk <= c.num_moe_experts,
          fmt::format("model.moe_router_topk is {}: 1 to model.num_moe_experts = {}", c.moe_router_topk, c.num_moe_experts));
  if (c.moe_router_num_groups > 0) {
    require(c.num_moe_experts % c.moe_router_num_groups == 0,
            fmt::format("model.moe_router_num_groups is {}: must divide model.num_moe_experts = {}", c.moe_router_num_groups,
                        c.num_moe_experts));
    require(c.moe_router_group_topk >= 1 && c.moe_router_group_topk <= c.moe_router_num_groups,
            fmt::format("model.moe_router_group_topk is {}: 1 to model.moe_router_num_groups = {}", c.moe_router_group_topk,
                        c.moe_router_num_groups));
    const int64_t size = c.num_moe_experts / c.moe_router_num_groups;
    require(c.moe_router_topk <= size * c.moe_router_group_topk,
            fmt::format("model.moe_router_topk is {}: the {} groups of {} experts hold {}", c.moe_router_topk,
                        c.moe_router_group_topk, size, size * c.moe_router_group_topk));
    require(c.moe_router_group_experts <= size && c.moe_router_topk / c.moe_router_group_topk <= size,
            fmt::format("router groups of {} experts are scored by {} of them", size,
                        std::max(c.moe_router_group_experts, c.moe_router_topk / c.moe_router_group_topk)));
  }
  require(!c.moe_router_enable_expert_bias || c.moe_router_score == RouterScore::kSigmoid,
          "model.moe_router_enable_expert_bias=true: only with model.moe_router_score_function=sigmoid");
  require(!c.moe_shared_expert_gate || c.moe_shared_expert_intermediate_size > 0,
          "model.moe_shared_expert_gate=true: only with model.moe_shared_expert_intermediate_size");
  unsupported(c.activation != ActivationKind::kSwiGlu && c.activation != ActivationKind::kQuickGeglu,
              "experts without a gated SiLU or quick GELU");
  unsupported(c.add_bias_linear && c.moe_shared_expert_intermediate_size > 0, "shared experts with biases");
  unsupported(c.activation != ActivationKind::kSwiGlu && c.moe_shared_expert_intermediate_size > 0,
              "shared experts with another activation than SwiGLU");
}

}  // namespace mbridge
