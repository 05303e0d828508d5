// The MLP of a mixture-of-experts layer: router, routed experts, shared experts
// (megatron/core/transformer/moe/moe_layer.py). Every token goes to its k experts; none is dropped.
#pragma once

#include <functional>
#include <string>

#include "engine/core/arena.h"
#include "engine/model/linear.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"
#include "engine/ops/moe_permute.h"
#include "engine/ops/router.h"

namespace mbridge {

// Parameter indices. Experts' weights stand one after another: `fc1` + e is expert e's.
struct MoeParameters {
  int router = -1;         // [E, h].
  int router_bias = -1;    // [E], with biases.
  int expert_bias = -1;    // [E] F32, not trainable: DeepSeek-V3's correction of the choice.
  int fc1 = -1, fc2 = -1;  // [2 n, h] and [h, n] of the first expert.
  int fc1_bias = -1, fc2_bias = -1;
  Linear shared_fc1, shared_fc2;  // Without shared experts their weights are -1.
  int shared_gate = -1;           // [1, h].

  bool present() const { return router >= 0; }
};

// "<prefix>router.weight", "<prefix>experts.linear_fc1.weight<e>", "<prefix>shared_experts.linear_fc1.weight", ... in
// Megatron-LM's order of creation. `declare` returns the index.
MoeParameters DeclareMoe(const GptConfig& config, const std::string& prefix,
                         const std::function<int(const ParameterDeclaration&)>& declare);

// What backward needs. T tokens, R = T k rows, n = moe_ffn_hidden_size.
struct MoeRecord {
  Tensor logits, scores;          // F32 [T, E].
  Tensor experts, probabilities;  // I32 and F32 [T, k].
  ExpertRows rows;
  Tensor fc1_output, activated;                // [R, 2 n], [R, n].
  Tensor shared_fc1_output, shared_activated;  // [T, 2 ns], [T, ns].
  Tensor shared_output, shared_gate;           // [T, h] before the gate, F32 [T, 1]: with a gate.
  Tensor slopes;                               // F32 [sequences, E]: of the balance loss.
  Tensor balance_loss;                         // F32 [1]: sum over microbatches, coefficient included.
  Tensor load;                                 // F32 [E]: tokens of each expert since the expert bias moved.

  // What selective recomputation makes again in backward comes from `again`, which layers may share.
  static MoeRecord Allocate(Arena* arena, Arena* again, const Step& step);
};

struct MoeScratch {
  Tensor sorted_a, sorted_b;                // [R, h].
  Tensor d_activated, d_fc1;                // [R, n], [R, 2 n].
  Tensor d_probabilities, d_logits;         // F32 [T, k], [T, E].
  Tensor hidden;                            // [T, h].
  Tensor shared_d_activated, shared_d_fc1;  // [T, ns], [T, 2 ns].
  Tensor input_f32, weight_f32;             // F32 [T, h], [E, h]: copies for the router where storage is narrow.
  Tensor weight_grad;                       // F32, the largest weight.
  Tensor whole_x, whole_dy;                 // [s, b, h], with sequence parallelism.

  static MoeScratch Allocate(Arena* arena, const Step& step);
};

// Over tensor-parallel ranks each expert is split as a plain MLP is; every rank routes all tokens, so that router and load are
// the same on all. x, output, dx and dy are of the residual stream: [s, b, h], or this rank's rows with sequence parallelism.

// output from x. In training counts the load and prepares the balance loss.
void MoeForward(const Step& step, const MoeParameters& parameters, const Weights& weights, const MoeScratch& scratch,
                const MoeRecord& record, const Tensor& x, const Tensor& output);

// record.activated from record.fc1_output, as MoeForward does it.
void MoeActivation(const Step& step, const MoeRecord& record);

// dx from dy, apart. Adds to the main gradients.
void MoeBackward(const Step& step, const MoeParameters& parameters, const Weights& weights, const MoeScratch& scratch,
                 const MoeRecord& record, const Tensor& x, const Tensor& dy, const Tensor& dx);

RouterOptions RouterOptionsOf(const Step& step);

// Throws EngineError for a combination that can't be built (ValidateGptConfig calls it).
void ValidateMoe(const GptConfig& config);

}  // namespace mbridge
