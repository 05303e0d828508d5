// What stands between and around an expert's two products: gated activation weighted by the token's probability, biases, and the
// gate of a shared expert (megatron/core/transformer/moe/experts.py, shared_experts.py, fusions/fused_bias_swiglu.py).
//
// Rows are sorted by expert (moe_permute.h): R rows; row r is for slot slots[r] of probabilities [T, k].
#pragma once

#include <span>

#include "engine/core/op.h"
#include "engine/ops/moe_permute.h"

namespace mbridge {

enum class GateKind : uint8_t {
  kSilu,       // g(u) = u sigmoid(u).
  kQuickGelu,  // g(u) = u sigmoid(1.702 u).
};

struct ExpertActivationOptions {
  GateKind gate = GateKind::kSilu;
  float clamp = 0.0f;          // u1 at most this, u2 within +- this; 0: not (activation_func_clamp_value).
  float linear_offset = 0.0f;  // Added to u2 (glu_linear_offset).
  bool fused = true;           // One rounding; else each step: round(g), round(product), round(weighted).
  DType precision = DType::kF32;
  DType router_precision = DType::kF32;  // Of the probabilities and their gradient.
};

// y [R, n] = round(g(u1) (u2 + offset) p), u1 and u2 the first and second n columns of x [R, 2 n], p the row's probability.
extern Op<void(const Context&, const Tensor& x, const ExpertRows& rows, const Tensor& probabilities,
               const ExpertActivationOptions& options, const Tensor& y)>
    ExpertActivationForward;

// dx [R, 2 n] rounded once per element; d_probabilities [T, k] F32 = the sum over the row of
// dy g(u1) (u2 + offset), rounded to the router's precision. Clamped values have no slope.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const ExpertRows& rows, const Tensor& probabilities,
               const ExpertActivationOptions& options, const Tensor& dx, const Tensor& d_probabilities)>
    ExpertActivationBackward;

// x = round(round(x) + round(p b_e)) in place, p = 1 where `probabilities` is empty. x [R, n], biases E tensors [n].
extern Op<void(const Context&, const Tensor& x, std::span<const Tensor> biases, const ExpertRows& rows,
               const Tensor& probabilities, DType precision)>
    ExpertBiasAdd;

// main_grads[e] (F32 [n]) += round(sum over the expert's rows of p dy); with `probabilities` also d_probabilities [T, k] F32 +=
// dy . b_e.
extern Op<void(const Context&, const Tensor& dy, std::span<const Tensor> biases, const ExpertRows& rows,
               const Tensor& probabilities, DType precision, std::span<const Tensor> main_grads, const Tensor& d_probabilities)>
    ExpertBiasBackward;

// y [T, n] = round(x round(sigmoid(logits))), logits [T, 1] F32, rounded on read.
extern Op<void(const Context&, const Tensor& x, const Tensor& logits, DType precision, const Tensor& y)> SharedGateForward;

// With g = round(sigmoid), as in forward: dx [T, n] = round(dy g); d_logits [T, 1] F32 = round(round(sum of dy x) g (1 -
// g)). dx may be dy.
extern Op<void(const Context&, const Tensor& dy, const Tensor& x, const Tensor& logits, DType precision, const Tensor& dx,
               const Tensor& d_logits)>
    SharedGateBackward;

}  // namespace mbridge
