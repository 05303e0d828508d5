// Angles of the rotary position embedding (megatron/core/models/common/embeddings/rotary_pos_embedding.py).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core/tensor.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Elements of a head that are turned: rotary_percent of kv_channels, rounded down.
int64_t RotaryWidth(const GptConfig& config);

// Radians per position of each pair, [RotaryWidth / 2]: rotary_base^(-2 i / RotaryWidth) in fp32, with the Llama 3 scaling if
// rope_scaling (wavelengths above original / low_factor are divided by the factor, those below original / high_factor stay, in
// between the two are blended).
std::vector<float> RotaryFrequencies(const GptConfig& config);

// cosine, sine F32 [s, RotaryWidth / 2]: of the fp32 product of position (times 1 / seq_len_interpolation_factor) and frequency,
// rounded to the model dtype.
void FillRotaryTables(const GptConfig& config, const Tensor& cosine, const Tensor& sine);

// The config that gives the tables of rotary_base_local.
GptConfig LocalRotaryConfig(GptConfig config);

}  // namespace mbridge
