// Gated delta net: a mixer whose state of fixed size takes the place of attention's keys and values
// (megatron/core/ssm/gated_delta_net.py; engine/ops/gated_delta_rule.h has the recurrence).
#pragma once

#include <functional>
#include <string>

#include "engine/core/arena.h"
#include "engine/model/linear.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"
#include "engine/ops/gated_delta_rule.h"

namespace mbridge {

// Parameter indices.
struct GatedDeltaParameters {
  Linear in_proj;     // Rows: queries, keys, values, gates of the output, then of each value head beta's and the decay's.
  int conv = -1;      // [queries, keys and values, 1, linear_conv_kernel_dim].
  int dt_bias = -1;   // [linear_num_value_heads].
  int a_log = -1;     // [linear_num_value_heads].
  int out_norm = -1;  // [linear_value_head_dim], for each value head.
  Linear out_proj;    // [h, value width].

  bool present() const { return in_proj.weight >= 0; }
};

// "<prefix>in_proj.weight", ... in Megatron-LM's order of creation. `declare` returns the index.
GatedDeltaParameters DeclareGatedDelta(const GptConfig& config, const std::string& prefix,
                                       const std::function<int(const ParameterDeclaration&)>& declare);

// What backward needs.
struct GatedDeltaRecord {
  Tensor projected;        // [s, b, GatedDeltaWidth].
  Tensor mixed;            // [s, b, DeltaLayout::width()]: queries, keys and values after the convolution.
  Tensor log_decay, beta;  // F32 [s, b, value heads].
  Tensor states;           // F32 [b, value heads, chunks, key size, value size].
  Tensor read;             // [s, b, value width]: output of the recurrence.
  Tensor rstd;             // F32 [rows, value heads].
  Tensor gated;            // [s, b, value width]: input of out_proj.

  static GatedDeltaRecord Allocate(Arena* arena, const Step& step);
};

struct GatedDeltaScratch {
  Tensor d_projected;          // As GatedDeltaRecord::projected.
  Tensor d_mixed;              // As mixed.
  Tensor d_log_decay, d_beta;  // F32 [s, b, value heads].
  Tensor d_gated;              // [s, b, value width]; then the gradient of `read`.

  static GatedDeltaScratch Allocate(Arena* arena, const Step& step);
};

DeltaLayout DeltaLayoutOf(const GptConfig& config);

// Rows of in_proj.
int64_t GatedDeltaWidth(const GptConfig& config);

// record.gated from x [s, b, h].
void GatedDeltaForward(const Step& step, const GatedDeltaParameters& parameters, const Weights& weights,
                       const GatedDeltaRecord& record, const Tensor& x);

// dx [s, b, h] from scratch.d_gated, which is overwritten. Adds to the main gradients. weight_grad: F32, at least in_proj's
// weight.
void GatedDeltaBackward(const Step& step, const GatedDeltaParameters& parameters, const Weights& weights,
                        const GatedDeltaScratch& scratch, const GatedDeltaRecord& record, const Tensor& x, const Tensor& dx,
                        const Tensor& weight_grad);

// Throws EngineError for sizes that can't be built (ValidateGptConfig calls it where layers have the mixer).
void ValidateGatedDelta(const GptConfig& config);

}  // namespace mbridge
