// A model as keys of the recipe: the way back from ModelOf.
#pragma once

#include "absl/status/statusor.h"
#include "engine/model/gpt_config.h"
#include "mbridge/v1/config.pb.h"

namespace mbridge {

// Only keys that say what the model computes and its initial weights; sizes of batches and the precision are left out.
v1::ModelConfig ModelKeys(const GptConfig& model);

}  // namespace mbridge
