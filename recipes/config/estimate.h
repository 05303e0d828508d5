// What a configuration costs: parameters, floating-point operations, bytes per rank. Pure functions.
#pragma once

#include <cstdint>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/recipe.pb.h"

namespace mbridge::recipes {

// Parameters of the whole model (weights, biases, norms, embeddings).
int64_t CountParameters(const v1::ModelConfig& model);

// Model FLOPs of one token, forward and backward, a multiply-add as 2, no recompute (Megatron-Bridge
// training/utils/flop_utils.py): 6 per weight and token of the matrix products, plus attention over s/2 positions.
int64_t FlopsPerToken(const v1::ModelConfig& model);

// Bytes of one rank and of one checkpoint. Weights: the model's dtype. Gradients: fp32. Optimizer: fp32 master weights
// (not for an fp32 model) and two moments, divided by the data-parallel size with the distributed optimizer. Activations:
// what the CPU engine keeps of one micro batch until backward (layer inputs, norms, qkv, attention probabilities, MLP,
// dropout masks). Workspace: the logits and their gradients. Not counted: the program itself and communication buffers.
v1::MemoryEstimate EstimateMemory(const v1::ConfigContainer& config, int data_parallel);

}  // namespace mbridge::recipes
