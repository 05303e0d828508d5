// The keys of 8-bit and 4-bit linear layers (model.fp8, model.fp4 and those that follow them).
#pragma once

#include <string>
#include <vector>

#include "engine/model/gpt_config.h"
#include "mbridge/v1/config.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

void ReadLowPrecision(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems);

// One line for the log: recipe, layers, and whether their products take narrow operands or emulate them. Empty without.
// `narrow_products`: GptModel::HasNarrowProducts.
std::string DescribeLowPrecision(const GptConfig& model, bool narrow_products);

}  // namespace mbridge
