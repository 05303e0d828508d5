#include "client/mbctl/config_source.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <sstream>

#include "client/mbctl/model_recipe.h"
#include "client/mbctl/session.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {
namespace {

absl::StatusOr<std::string> ReadConfigFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return InvalidFields(v1::REASON_INVALID_REQUEST, {{"--config", fmt::format("cannot read {}", path)}});
  return text.str();
}

}  // namespace

void AddConfigSource(CLI::App* command, ConfigSource* source) {
  command->add_option("-r,--recipe", source->recipe, "Recipe to start from; mbctl recipe ls");
  command
      ->add_option("-c,--config", source->config_file,
                   "YAML file between recipe and overrides; submit --dry-run -o yaml writes one")
      ->type_name("FILE");
  command
      ->add_option("--hf", source->model,
                   "The model of a Hugging Face directory on the machine that trains (or org/name of its hub cache), below "
                   "--config and overrides; alone it means --recipe from_hf")
      ->type_name("DIR");
}

absl::StatusOr<v1::JobSpec> ReadConfigSource(Session* session, const ConfigSource& source, bool local) {
  if (source.recipe.empty() && source.config_file.empty() && source.model.empty()) {
    return absl::InvalidArgumentError(
        "--recipe is required where no --config file and no --hf model is given\nnext: mbctl recipe ls");
  }
  if (source.recipe == kModelRecipe && source.model.empty() && source.config_file.empty()) {
    return absl::InvalidArgumentError("recipe from_hf needs the model: --hf DIR, a directory with a config.json");
  }
  v1::JobSpec spec;
  spec.set_recipe(source.recipe);
  if (!source.config_file.empty()) {
    MB_ASSIGN_OR_RETURN(*spec.mutable_config_yaml(), ReadConfigFile(source.config_file));
  }
  if (!source.model.empty()) {
    MB_RETURN_IF_ERROR(AddModel(session, source.model, local, &spec));
  }
  return spec;
}

}  // namespace mbridge::mbctl
