#include "recipes/config/recipe_store.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"
#include "recipes/config/schema.h"

namespace mbridge::recipes {
namespace {

const ConfigFile* FindByName(const std::string& name) {
  for (const ConfigFile& file : RecipeFiles()) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

v1::Recipe ToRecipe(const ConfigFile& file) {
  v1::Recipe recipe;
  recipe.set_name(file.name);
  recipe.mutable_aliases()->Assign(file.aliases.begin(), file.aliases.end());
  recipe.set_description(file.description);
  recipe.set_trainable(file.not_trainable.empty());
  recipe.set_not_trainable_reason(file.not_trainable);
  return recipe;
}

// Of a recipe and its bases; the recipe's own word on a key counts.
absl::Status AddDifferences(const ConfigFile& file, v1::Recipe* recipe) {
  MB_ASSIGN_OR_RETURN(const std::vector<const ConfigFile*> chain, RecipeChain(file));
  std::set<std::string> said;
  for (auto it = chain.rbegin(); it != chain.rend(); ++it) {
    for (const BridgeDifference& difference : (*it)->differences) {
      if (!said.insert(difference.key).second || difference.why.empty()) continue;
      v1::RecipeDifference* added = recipe->add_differences();
      added->set_key(difference.key);
      added->set_bridge(difference.bridge);
      added->set_why(difference.why);
    }
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<ConfigFile>& RecipeFiles() {
  static const std::vector<ConfigFile>* files = [] {
    auto* read = new std::vector<ConfigFile>();
    for (const EmbeddedRecipe* embedded = kEmbeddedRecipes; embedded->file != nullptr; ++embedded) {
      absl::StatusOr<ConfigFile> file = ParseConfigFile(embedded->file, embedded->yaml);
      if (!file.ok()) throw std::logic_error("embedded recipe: " + std::string(file.status().message()));
      read->push_back(*std::move(file));
    }
    std::sort(read->begin(), read->end(), [](const ConfigFile& a, const ConfigFile& b) { return a.name < b.name; });
    return read;
  }();
  return *files;
}

absl::StatusOr<const ConfigFile*> FindRecipeFile(const std::string& name_or_alias) {
  std::vector<std::string> names;
  for (const ConfigFile& file : RecipeFiles()) {
    if (file.is_abstract) continue;
    names.push_back(file.name);
    names.insert(names.end(), file.aliases.begin(), file.aliases.end());
    if (file.name == name_or_alias || std::find(file.aliases.begin(), file.aliases.end(), name_or_alias) != file.aliases.end())
      return &file;
  }
  return MakeStatus(
      absl::StatusCode::kNotFound, v1::REASON_UNKNOWN_RECIPE,
      "there is no recipe '" + name_or_alias + "'; `mbctl recipe ls` lists the recipes" + DidYouMean(name_or_alias, names));
}

absl::StatusOr<std::vector<const ConfigFile*>> RecipeChain(const ConfigFile& recipe) {
  std::vector<const ConfigFile*> chain;
  for (const ConfigFile* file = &recipe; file != nullptr;) {
    if (std::find(chain.begin(), chain.end(), file) != chain.end())
      return absl::InternalError("the bases of " + recipe.name + " form a ring");
    chain.push_back(file);
    if (file->base.empty()) break;
    const std::string base = file->base;
    file = FindByName(base);
    if (file == nullptr) return absl::InternalError("the base " + base + " of recipe " + recipe.name + " does not exist");
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

std::vector<v1::Recipe> ListRecipes() {
  std::vector<v1::Recipe> recipes;
  for (const ConfigFile& file : RecipeFiles()) {
    if (!file.is_abstract) recipes.push_back(ToRecipe(file));
  }
  return recipes;
}

absl::StatusOr<v1::Recipe> FindRecipe(const std::string& name_or_alias) {
  MB_ASSIGN_OR_RETURN(const ConfigFile* file, FindRecipeFile(name_or_alias));
  v1::Recipe recipe = ToRecipe(*file);
  MB_RETURN_IF_ERROR(AddDifferences(*file, &recipe));
  return recipe;
}

}  // namespace mbridge::recipes
