// Angles of the rotary position embedding (megatron/core/models/common/embeddings/rotary_pos_embedding.py).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core/tensor.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Elements of a head that are turned: rotary_percent of kv_channels (of qk_pos_emb_head_dim in multi-latent attention), rounded
// down.
int64_t RotaryWidth(const GptConfig& config);

// Radians per position of each pair, [RotaryWidth / 2]: rotary_base^(-2 i / RotaryWidth) in fp32, then the scaling, if any:
//   Llama 3: wavelengths above original / low_factor are divided by the factor, those below original / high_factor stay, in
//     between the two are blended.
//   Dynamic NTK, for a seq_length above the original: the base grows by (factor seq_length / original - (factor - 1))^(w / (w -
//   2)). YaRN (arXiv 2309.00071): pairs that turn more than beta_fast times within the original length stay, those below
//   beta_slow
//     times are divided by the factor, in between a ramp over the pairs' indices.
//   LongRoPE (arXiv 2402.13753): each is divided by its factor.
std::vector<float> RotaryFrequencies(const GptConfig& config);

// YaRN's factor of cosines and sines; mscale and mscale_all_dim count only where both are given (not 0).
double YarnAttentionFactor(double factor, double mscale, double mscale_all_dim);

// cosine, sine F32 [s, RotaryWidth / 2]: of the fp32 product of position (times 1 / seq_len_interpolation_factor) and frequency,
// times rope_attention_factor, rounded to the model dtype.
void FillRotaryTables(const GptConfig& config, const Tensor& cosine, const Tensor& sine);

// The config that gives the tables of rotary_base_local.
GptConfig LocalRotaryConfig(GptConfig config);

}  // namespace mbridge
