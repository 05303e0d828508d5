// One layer (megatron/core/transformer/transformer_layer.py): a block that mixes tokens and an MLP block, or one of them
// (GptConfig's mixers), each with a norm before it, or of its output, or both, and a bias-dropout-add after.
#pragma once

#include "engine/core/arena.h"
#include "engine/model/core_attention.h"
#include "engine/model/gated_delta_net.h"
#include "engine/model/linear.h"
#include "engine/model/mamba.h"
#include "engine/model/mla.h"
#include "engine/model/moe.h"
#include "engine/model/norm.h"
#include "engine/model/step.h"
#include "engine/model/weights.h"
#include "engine/ops/attention.h"

namespace mbridge {

// Parameter indices of a layer.
struct LayerParameters {
  int64_t layer = 0;  // Counted from 0 over the whole model.
  bool has_mixer = true, has_mlp = true;
  Norm input_norm, mlp_norm;                // With pre_layernorm.
  Norm attention_post_norm, mlp_post_norm;  // With post_layernorm.
  Linear proj, qkv, fc1, fc2;
  MlaParameters mla;                     // In place of qkv.
  MambaParameters mamba;                 // In place of attention or beside it.
  GatedDeltaParameters delta;            // In place of attention.
  int sinks = -1;                        // Index of [heads], with attention_sinks.
  MoeParameters moe;                     // In place of fc1 and fc2.
  int query_gamma = -1, key_gamma = -1;  // Indices of [kv_channels] (or of all heads together), with qk_layernorm.
};

// Activations of one layer and microbatch, of this rank's heads and MLP columns. [s, b, ...] in the storage dtype unless said;
// what has the hidden size is the residual stream [stream length, b, h] (tensor_parallel.h). Masks are empty without dropout.
struct LayerRecord {
  Tensor input;  // The residual stream that enters; set by the caller.
  NormRecord input_norm, mlp_norm, attention_post_norm, mlp_post_norm;
  Tensor normed_input;    // h; empty without pre_layernorm.
  Tensor projected;       // Output of linear_qkv: heads' queries, keys, values.
  Tensor qk_rstd;         // F32 [rows, heads + groups] (or [rows, 2]), with qk_layernorm.
  Tensor qk_sums;         // F32 [rows, 2], scratch of norms over projections that are split over ranks.
  Tensor qkv;             // What attention reads: normalised and turned; without qk_layernorm the memory of `projected`.
  Tensor attention_keep;  // U8 [b, heads, s, s].
  CoreAttentionRecord attention;
  Tensor context;              // heads * kv_channels.
  Tensor proj_keep, fc2_keep;  // U8, h.
  Tensor middle;               // h: after the mixer's bias-dropout-add, if both blocks are there.
  Tensor normed_middle;        // h; empty without pre_layernorm.
  Tensor fc1_output;           // Fc1Width; without bias, unrounded if storage is F32.
  Tensor activated;            // ffn.
  MoeRecord moe;               // In place of the two.
  MlaRecord mla;               // In place of `projected`.
  MambaRecord mamba;
  GatedDeltaRecord delta;
  Tensor output_gate, gated_context;                        // As context, with attention_output_gate.
  Tensor sink_probabilities;                                // F32 [b, heads, s], with attention_sinks.
  Tensor attention_output, mlp_output;                      // h: inputs of the post norms, with post_layernorm.
  NarrowInput qkv_input, proj_input, fc1_input, fc2_input;  // Of a low-precision layer; normed_* and activated are scratch then.

  PhiloxStream attention_stream;  // Where attention_keep was drawn, if it is drawn again in backward.

  // Parts that selective recomputation makes again in backward come from `again`, which layers may share.
  static LayerRecord Allocate(Arena* arena, Arena* again, const Step& step, int64_t layer);
  // What backward does not need goes through the scratch that forward leaves unused.
  void ShareScratch(const Step& step, const struct LayerScratch& scratch);
};

// Scratch that the layers of a model share.
struct LayerScratch {
  Tensor hidden_a, hidden_b;        // [stream length, b, h].
  Tensor d_context;                 // [s, b, heads * kv_channels].
  Tensor d_qkv;                     // As qkv.
  Tensor d_activated;               // [s, b, ffn].
  Tensor d_fc1;                     // [s, b, Fc1Width]; the memory of d_activated if that is as wide.
  Tensor weight_grad;               // F32, the largest weight of a layer.
  Tensor attention;                 // U8, attention's workspace.
  Tensor unused_load, unused_loss;  // Of experts, in place of MoeRecord's sums where they run again.
  MoeScratch moe;
  MlaScratch mla;
  MambaScratch mamba;
  GatedDeltaScratch delta;
  Tensor wide_qkv;       // [s, b, QkvWidth], with attention_output_gate.
  Tensor d_output_gate;  // As d_context, with it.

  static LayerScratch Allocate(Arena* arena, const Step& step, int threads);
};

// output [stream length, b, h] = layer(record->input). Draws the dropout masks in Megatron-LM's order if step.training(). Without
// output: only what backward needs. `entering`: the sum that record->input still is. leaving: null, or set where output is left
// as a sum, of tensors of this record and of the scratch.
void TransformerLayerForward(const Step& step, const LayerParameters& parameters, const Weights& weights,
                             const LayerScratch& scratch, LayerRecord* record, const Tensor& output, const OpenSum& entering,
                             OpenSum* leaving);

// `gradient`: of the output on entry, of the input on return. Adds to the main gradients.
void TransformerLayerBackward(const Step& step, const LayerParameters& parameters, const Weights& weights,
                              const LayerScratch& scratch, const LayerRecord& record, const Tensor& gradient);

// The same layer again, for backward: the record's tensors get the same bits if the streams of `step` stand where they stood.
// What experts sum over microbatches stays as it is.
void TransformerLayerAgain(const Step& step, const LayerParameters& parameters, const Weights& weights,
                           const LayerScratch& scratch, const LayerRecord& record, const Tensor& output, const OpenSum& entering,
                           OpenSum* leaving);

// Where each maker of the residual stream's gradient takes its largest value, for the linear layer that it goes on to; empty if
// nobody asks.
Tensor StreamGradientMaximum(const Step& step, const Tensor& gradient);

AttentionOptions AttentionOptionsOf(const Step& step, int64_t layer);

}  // namespace mbridge
