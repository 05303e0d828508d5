// Lines that families with Mamba-2 mixers share.
#pragma once

#include <string>
#include <vector>

#include "engine/bridge/config_keys.h"
#include "engine/bridge/tensor_map.h"

namespace mbridge {

// decoder.layers.{layer}.mixer.*: `theirs` and, if it is another, `runtime` are what stands before "in_proj.weight".
std::vector<TensorRule> MambaTensors(const std::string& theirs, const std::string& runtime = "");

// time_step_limit: bounds of the time step.
ConfigKey TimeStepLimitKey();
// time_step_min and others that count for initial weights alone, and sizes of chunks that change no result.
ConfigKey MambaFreeKeys();

// All layers are alike. Also of a number that no model has.
void SetLayers(MixerKind mixer, bool mlp, GptConfig* config);

}  // namespace mbridge
