// Rules between keys. Every message names the key, its value, what is allowed and the next step.
#pragma once

#include <string>
#include <vector>

#include "recipes/config/config_state.h"
#include "recipes/config/derive.h"

namespace mbridge::recipes {

// The command line that was typed: messages show it completed.
struct CommandLine {
  std::string recipe;
  std::vector<std::string> overrides;
};

// What a job can't do without; only warnings where a recipe without sizes is shown.
void ValidateRequired(bool for_a_job, ConfigState* state);
void ValidateModel(ConfigState* state);
void ValidateCheckpoints(ConfigState* state);
void ValidateBatch(const Layout& layout, ConfigState* state);
void ValidateSchedule(const CommandLine& command, ConfigState* state);

// Keys whose value needs an engine part that this version doesn't have, as "key=value (accepted: ...)".
std::vector<FieldViolation> UnsupportedKeys(const ConfigState& state);

// 8-bit and 4-bit linear layers: what fits together. Called by ValidateModel.
void ValidatePrecision(ConfigState* state);
// Values of their keys that the engine does not have. Part of UnsupportedKeys.
std::vector<FieldViolation> UnsupportedPrecision(const v1::ModelConfig& model);
// Recomputation and CUDA graphs: what fits together, and what the engine does not have. Called by ValidateModel, UnsupportedKeys.
void ValidateExecution(ConfigState* state);
std::vector<FieldViolation> UnsupportedExecution(const v1::ModelConfig& model);
// The sentence of proto/format/cuda_parts.h on a model that a GPU does not train; otherwise empty.
std::string UnsupportedOnCuda(const v1::ModelConfig& model);

// Experts: sizes that don't fit together. Called by ValidateModel.
void ValidateExperts(ConfigState* state);
// Values of the keys of experts and multi-latent attention that the engine does not have. Part of UnsupportedKeys.
std::vector<FieldViolation> UnsupportedExpertParts(const v1::ModelConfig& model);

// Layers with other mixers than attention, and multipliers. Called by ValidateModel, UnsupportedKeys.
void ValidateMixers(ConfigState* state);
std::vector<FieldViolation> UnsupportedMixerParts(const v1::ModelConfig& model);

}  // namespace mbridge::recipes
