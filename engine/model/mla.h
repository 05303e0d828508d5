// Multi-latent attention: keys and values, and if wanted queries, come from a narrow latent vector
// (megatron/core/transformer/multi_latent_attention.py).
#pragma once

#include <functional>
#include <string>

#include "engine/core/arena.h"
#include "engine/model/linear.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"
#include "engine/ops/mla_heads.h"

namespace mbridge {

// Parameter indices.
struct MlaParameters {
  Linear q;               // linear_q_proj, without q_lora_rank.
  Linear q_down, q_up;    // With it.
  Linear kv_down, kv_up;  // [kv_lora_rank + qk_pos_emb_head_dim, h]; [heads (qk_head_dim + v_head_dim), kv_lora_rank].
  int q_gamma = -1, kv_gamma = -1;

  bool present() const { return kv_down.weight >= 0; }
};

// "<prefix>linear_q_proj.weight", ... in Megatron-LM's order of creation. `declare` returns the index.
MlaParameters DeclareMla(const GptConfig& config, const std::string& prefix,
                         const std::function<int(const ParameterDeclaration&)>& declare);

// What backward needs, [s, b, ...].
struct MlaRecord {
  Tensor q_down, q_normed, q_rstd;        // q_lora_rank; F32 [rows].
  Tensor latent, latent_normed, kv_rstd;  // kv_lora_rank; F32 [rows].
  Tensor down;                            // Output of linear_kv_down_proj, where qkv is made again in backward.

  static MlaRecord Allocate(Arena* arena, const Step& step);
};

struct MlaScratch {
  Tensor query, key_value, down;  // Outputs of the projections, then their gradients.
  Tensor d_query_latent;          // [s, b, q_lora_rank].
  Tensor d_latent;                // [s, b, kv_lora_rank].
  Tensor hidden;                  // [s, b, h].
  Tensor partial;                 // [s, b, h], with sequence parallelism.

  static MlaScratch Allocate(Arena* arena, const Step& step);
};

MlaLayout MlaLayoutOf(const GptConfig& config);

// Elements of the largest weight.
int64_t LargestMlaWeight(const GptConfig& config);

// Over tensor-parallel ranks the heads are split; the latent vectors are the same on every rank. x and dx are of the residual
// stream: [s, b, h], or this rank's rows with sequence parallelism.

// qkv [s, b, MlaLayoutOf().qkv().width()], turned, from x.
void MlaForward(const Step& step, const MlaParameters& parameters, const Weights& weights, const MlaScratch& scratch,
                const MlaRecord& record, const Tensor& x, const Tensor& qkv);

// The part of MlaForward from the latent vectors on (and the queries from x, where they have none).
void MlaUpForward(const Step& step, const MlaParameters& parameters, const Weights& weights, const MlaScratch& scratch,
                  const MlaRecord& record, const Tensor& x, const Tensor& qkv);

// dx from d_qkv. Adds to the main gradients. weight_grad: F32, at least LargestMlaWeight.
void MlaBackward(const Step& step, const MlaParameters& parameters, const Weights& weights, const MlaScratch& scratch,
                 const MlaRecord& record, const Tensor& x, const Tensor& d_qkv, const Tensor& dx, const Tensor& weight_grad);

// Throws EngineError for a combination that can't be built (ValidateGptConfig calls it).
void ValidateMla(const GptConfig& config);

}  // namespace mbridge
