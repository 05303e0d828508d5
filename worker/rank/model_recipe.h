// A Hugging Face model as a configuration file.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/bridge/model_directory.h"

namespace mbridge {

// YAML for `mbctl submit --config`, over the recipe from_hf: the model of a directory (or org/name of the hub cache) as its
// config.json tells; there need be no weights. seq_length: of a sample; 0: max_position_embeddings, without a position table at
// most 4096. UNSUPPORTED_MODEL when the configuration has no keys for a part of the model.
absl::StatusOr<std::string> RecipeOfModel(const std::string& directory_or_name, const AllowedRoots& roots, int64_t seq_length);

}  // namespace mbridge
