// The Mamba-2 mixer (megatron/core/ssm/mamba_mixer.py): in_proj makes z, x, B, C and dt of each token; x, B and C pass a short
// causal convolution; the selective scan runs over them; z gates its output, which is normalised and leaves by out_proj.
//
// With several tensor-parallel ranks each has some of the groups, with their heads.
#pragma once

#include <functional>
#include <string>

#include "engine/core/arena.h"
#include "engine/model/linear.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"

namespace mbridge {

// Parameter indices. n = heads * head_dim, w = n + 2 groups * state_dim.
struct MambaParameters {
  Linear in_proj;                        // [n + w + heads, h]: rows of z, x, B, C, dt.
  int conv_weight = -1;                  // [w, 1, kernel].
  int conv_bias = -1;                    // [w], with mamba_conv_bias.
  int dt_bias = -1, a_log = -1, d = -1;  // [heads].
  int norm = -1;                         // [n], with mamba_rms_norm.
  Linear out_proj;                       // [h, n].

  bool present() const { return in_proj.weight >= 0; }
};

// "<prefix>in_proj.weight", "<prefix>conv1d.weight", ... in Megatron-LM's order of creation. `declare` returns the index.
MambaParameters DeclareMamba(const GptConfig& config, const std::string& prefix,
                             const std::function<int(const ParameterDeclaration&)>& declare);

// What backward needs, [s, b, ...].
struct MambaRecord {
  Tensor projected;  // n + w + heads: of in_proj, multiplied.
  Tensor convolved;  // w.
  Tensor scanned;    // n.
  Tensor rstd;       // F32 [rows, norm groups], with mamba_rms_norm.
  Tensor gated;      // n: input of out_proj.

  static MambaRecord Allocate(Arena* arena, const Step& step);
};

struct MambaScratch {
  Tensor d_gated;      // n; then the gradient of `scanned`.
  Tensor d_convolved;  // w.
  Tensor d_projected;  // n + w + heads.
  Tensor hidden;       // [stream length, b, h], beside attention.
  Tensor workspace;    // U8, of the scan.

  static MambaScratch Allocate(Arena* arena, const Step& step, int threads);
};

// Width of in_proj's output.
int64_t MambaProjectionWidth(const GptConfig& config);
// n.
int64_t MambaInnerWidth(const GptConfig& config);

// record.gated from x, a residual stream.
void MambaForward(const Step& step, const MambaParameters& parameters, const Weights& weights, const MambaScratch& scratch,
                  const MambaRecord& record, const Tensor& x);

// dx from scratch.d_gated, which is overwritten. Adds to the main gradients. weight_grad: F32, at least in_proj's weight.
void MambaBackward(const Step& step, const MambaParameters& parameters, const Weights& weights, const MambaScratch& scratch,
                   const MambaRecord& record, const Tensor& x, const Tensor& dx, const Tensor& weight_grad);

// Throws EngineError for sizes and combinations that can't be built (ValidateGptConfig calls it where layers have the mixer).
void ValidateMamba(const GptConfig& config);

}  // namespace mbridge
