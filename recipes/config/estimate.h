// What a configuration costs: parameters, floating-point operations, bytes per rank. Pure functions.
#pragma once

#include <cstdint>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/node.pb.h"
#include "mbridge/v1/recipe.pb.h"

namespace mbridge::recipes {

// Parameters of the whole model (weights, biases, norms, embeddings).
int64_t CountParameters(const v1::ModelConfig& model);

// Model FLOPs of one token, forward and backward, a multiply-add as 2, no recompute (Megatron-Bridge
// training/utils/flop_utils.py): 6 per weight and token of the matrix products, plus attention over s/2 positions.
int64_t FlopsPerToken(const v1::ModelConfig& model);

// Parameters of one rank (on the fuller of the end stages).
int64_t ParametersOfRank(const v1::ModelConfig& model);

// Bytes of one rank and of one checkpoint, as the engine lays them out on `device` (unspecified: the CPU): weights in the model's
// dtype, fp32 gradients, masters and moments (divided by the data-parallel size with the distributed optimizer), activations that
// stay until backward, workspaces, on a GPU CUDA with its libraries. Within a few percent of engine/train/memory_plan.h, which
// asks the engine itself.
v1::MemoryEstimate EstimateMemory(const v1::ConfigContainer& config, int data_parallel, v1::Device device);

}  // namespace mbridge::recipes
