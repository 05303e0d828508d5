// What Megatron-LM's arguments say about a model, both ways. Names and meanings: megatron/training/arguments.py.
#pragma once

#include "absl/status/statusor.h"
#include "engine/megatron/pickle_value.h"
#include "engine/megatron/pickle_writer.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// The model of a run's arguments (a dict by name), in fp32. Absent arguments have Megatron-LM's defaults. INVALID_ARGUMENT
// (UNSUPPORTED_MODEL) lists arguments that are missing, of another type, or mean what the engine does not do.
absl::StatusOr<GptConfig> ModelOfArguments(const PickleValue& arguments);

// Appends argparse's Namespace with the arguments of the model, for one rank. `dtype`: of the parameters.
void WriteArguments(const GptConfig& config, DType dtype, PickleWriter* pickle);

// Parts of a model for which Megatron-LM has no argument; empty: it can say all of it.
std::vector<std::string> PartsWithoutArgument(const GptConfig& config);

}  // namespace mbridge
