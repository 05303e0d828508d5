// The keys of a recipe's model that only some families use, both ways: norms, scales, patterns of layers, kinds of rotation.
#pragma once

#include <vector>

#include "engine/model/gpt_config.h"
#include "mbridge/v1/config.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

// `model` gets the values of `keys`; after its shape, position_embedding_type and activation. A key that the engine cannot do is
// a problem.
void ReadModelParts(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems);

// The same keys of a model; keys at their defaults are left out.
void WriteModelParts(const GptConfig& model, v1::ModelConfig* keys);

// activation_func and gated_linear_unit.
void ReadActivation(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems);
void WriteActivation(const GptConfig& model, v1::ModelConfig* keys);

}  // namespace mbridge
