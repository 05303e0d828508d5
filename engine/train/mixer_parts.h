// What the layers of a hybrid model are made of, Mamba-2 and the multipliers as keys of a recipe (model.hybrid_layer_pattern,
// model.mamba_*, ...) and back. Pure functions.
#pragma once

#include <vector>

#include "engine/model/gpt_config.h"
#include "mbridge/v1/config.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

// Fills the parts; `gpt` holds sizes and experts already. Adds what cannot be built to `problems`.
void ReadMixerParts(const v1::ModelConfig& model, GptConfig* gpt, std::vector<FieldViolation>* problems);
// After WriteExpertParts.
void WriteMixerParts(const GptConfig& gpt, v1::ModelConfig* model);

}  // namespace mbridge
