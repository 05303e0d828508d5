// Mixture of experts, multi-latent attention and attention sinks as keys of a recipe: model.moe_*, model.kv_lora_rank, ... and
// back (a model that was imported is trained from such keys). Pure functions.
#pragma once

#include <vector>

#include "engine/model/gpt_config.h"
#include "mbridge/v1/config.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

// Fills the parts; `gpt` holds its sizes already. Adds what the engine does not build to `problems`.
void ReadExpertParts(const v1::ModelConfig& model, GptConfig* gpt, std::vector<FieldViolation>* problems);
void WriteExpertParts(const GptConfig& gpt, v1::ModelConfig* model);

}  // namespace mbridge
