// Choice of experts for each token, and the losses that keep the choice balanced (megatron/core/transformer/moe/router.py,
// moe_utils.py). Rows are tokens in [s, b] order; E experts, k of them a token.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

enum class RouterScore : uint8_t {
  kSoftmaxOfChosen,  // The k largest logits, then their softmax.
  kSoftmax,          // Softmax of all, then the k largest as they are (moe_router_pre_softmax).
  kSigmoid,          // Sigmoid of each; the k largest of score + bias, weighted by score / sum of the chosen scores (k > 1).
};

struct RouterOptions {
  RouterScore score = RouterScore::kSoftmaxOfChosen;
  int64_t topk = 0;
  int64_t groups = 0;             // Of equally many neighbouring experts; 0: no limit to groups.
  int64_t group_topk = 0;         // Groups that a token may use: those with the largest sum of their `group_experts` best scores.
  int64_t group_experts = 0;      // 1 .. E / groups.
  float scaling = 1.0f;           // Of the probabilities.
  DType precision = DType::kF32;  // Of logits, scores and probabilities.
};

// logits [T, E] F32, rounded on read; bias [E] F32 is added to the scores for the choice alone (kSigmoid), or empty. Equal
// scores: the lower index first.
//   scores [T, E] F32: unrounded softmax over all or sigmoid; experts [T, k] I32, best first;
//   probabilities [T, k] F32 = round(scaling round(score of the chosen)).
extern Op<void(const Context&, const Tensor& logits, const Tensor& bias, const RouterOptions& options, const Tensor& scores,
               const Tensor& experts, const Tensor& probabilities)>
    RouterForward;

// Gradients of the losses beside the model's own.
struct RouterAuxiliary {
  Tensor slopes;         // F32 [sequences, E]: d loss / d score of RouterBalanceLoss; empty: none.
  float z_slope = 0.0f;  // d_logits += round(z_slope logsumexp(logits) softmax(logits)): 2 coefficient / T for the mean square.
};

// d_logits [T, E] F32 = round(sum of round(gradient through the probabilities) and, rounded one by one, the auxiliary ones).
// d_probabilities [T, k] F32; the choice itself has no gradient.
extern Op<void(const Context&, const Tensor& d_probabilities, const Tensor& logits, const Tensor& scores, const Tensor& experts,
               const RouterOptions& options, const RouterAuxiliary& auxiliary, const Tensor& d_logits)>
    RouterBackward;

// Load balancing (switch_load_balancing_loss_func; with `sequences` > 1 the sequence-wise one: token i belongs to sequence
// i mod sequences, n = T / sequences tokens each). With f = coefficient E / (k n^2 sequences), c the number of tokens of a
// sequence that have an expert among their k best scores (no bias, no groups), scores normalised to sum 1 over the experts:
//   loss [1] F32 += sum f c score,  slopes [sequences, E] F32 = scale f c.
extern Op<void(const Context&, const Tensor& scores, const RouterOptions& options, float coefficient, float scale,
               const Tensor& loss, const Tensor& slopes)>
    RouterBalanceLoss;

// bias [E] F32 += rate sign(mean(load) - load): experts with less than the mean load are chosen more often from now on
// (get_updated_expert_bias). load [E] F32.
extern Op<void(const Context&, const Tensor& load, float rate, const Tensor& bias)> UpdateExpertBias;

}  // namespace mbridge
