// Where the API gets configurations from: recipes/config in the program, a few lines in tests.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/recipe.pb.h"
#include "recipes/config/resolve.h"

namespace mbridge::server {

struct RecipeSource {
  std::function<absl::StatusOr<v1::ResolvedConfig>(const recipes::ResolveRequest&)> resolve;
  std::function<std::vector<v1::Recipe>()> list;
  std::function<absl::StatusOr<v1::Recipe>(const std::string&)> find;
};

}  // namespace mbridge::server
