// The recipes that are compiled into the binary. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "recipes/config/assignment.h"

namespace mbridge::recipes {

struct EmbeddedRecipe {
  const char* file;  // "vanilla_gpt_pretrain_config.yaml"
  const char* yaml;
};
// Generated at build time from recipes/*.yaml; ends with {nullptr, nullptr}.
extern const EmbeddedRecipe kEmbeddedRecipes[];

// All recipe files, bases included, in the order of their names. A file that doesn't parse is a defect of the build and
// throws std::logic_error on first use (the tests read every file).
const std::vector<ConfigFile>& RecipeFiles();

// NOT_FOUND (UNKNOWN_RECIPE) with the nearest names. Takes names and aliases, not abstract bases.
absl::StatusOr<const ConfigFile*> FindRecipeFile(const std::string& name_or_alias);

// The file and its bases, base first.
absl::StatusOr<std::vector<const ConfigFile*>> RecipeChain(const ConfigFile& recipe);

}  // namespace mbridge::recipes
