// recipe ls|show|keys.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/dry_run.h"
#include "client/mbctl/model_recipe.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"
#include "recipes/config/schema.h"
#include "recipes/config/text_form.h"

namespace mbridge::mbctl {
namespace {

std::string RecipeTable(const std::vector<v1::Recipe>& recipes) {
  Table table({"RECIPE", "TRAINS", "DESCRIPTION"});
  std::string aliases;
  for (const v1::Recipe& recipe : recipes) {
    std::string description = recipe.description();
    if (!recipe.trainable()) description += fmt::format(" [not yet: {}]", recipe.not_trainable_reason());
    table.Add({recipe.name(), recipe.trainable() ? "yes" : "no", description});
    for (const std::string& alias : recipe.aliases()) aliases += fmt::format("  {} = {}\n", alias, recipe.name());
  }
  return table.Text() + (aliases.empty() ? "" : "aliases\n" + aliases);
}

void AddList(CLI::App* group, Session* session) {
  auto local = std::make_shared<bool>(false);
  auto* command = group->add_subcommand("ls", "List recipes");
  command->add_flag("--local", *local, "Those of mbctl itself; ask no coordinator");
  command->callback([=] {
    session->action = [=]() -> int {
      std::vector<v1::Recipe> recipes;
      if (*local) {
        recipes = recipes::ListRecipes();
      } else {
        MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
        MBCTL_ASSIGN_OR_FAIL(recipes, *session, client->ListRecipes());
      }
      v1::ListRecipesResponse all;
      std::string names;
      for (const v1::Recipe& recipe : recipes) {
        *all.add_recipes() = recipe;
        names += (names.empty() ? "" : "\n") + recipe.name();
      }
      return session->Print(all, names, [&] { return RecipeTable(recipes); });
    };
  });
}

// What Megatron-Bridge's recipe of the same name sets otherwise; empty where nothing.
std::string DescribeDifferences(const v1::Recipe& recipe, const v1::ResolvedConfig& resolved) {
  std::map<std::string, std::string> ours;
  for (const v1::ResolvedValue& value : resolved.values()) ours[value.key()] = value.value();
  std::string text;
  for (const v1::RecipeDifference& difference : recipe.differences()) {
    const auto found = ours.find(difference.key());
    const std::string here = found == ours.end() ? "null" : found->second;
    if (here == difference.bridge()) continue;  // An override made them equal.
    text += fmt::format("  {}: {}, there {} ({})\n", difference.key(), here, difference.bridge(), difference.why());
  }
  return text.empty() ? text : "\ndifferent from Megatron-Bridge's recipe\n" + text;
}

void AddShow(CLI::App* group, Session* session) {
  struct Flags {
    std::string recipe, config_file, model;
    std::vector<std::string> overrides;
    int ranks = 0;
    bool all = false, local = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = group->add_subcommand("show", "Resolve a recipe with overrides; every value with its origin");
  command->add_option("RECIPE", flags->recipe, "Name or alias")->required();
  command->add_option("OVERRIDES", flags->overrides, "key.path=value")->type_name("KEY=VALUE");
  command->add_option("-c,--config", flags->config_file, "YAML file between recipe and overrides")->type_name("FILE");
  command->add_option("--hf", flags->model, "As for submit; recipe from_hf needs it")->type_name("DIR");
  command->add_option("--ranks", flags->ranks, "Processes; 0: the smallest legal number")->check(CLI::Range(0, 1 << 20));
  command->add_flag("--all", flags->all, "Values that stand at their default too");
  command->add_flag("--local", flags->local, "Resolve in mbctl; ask no coordinator");
  command->callback([=] {
    session->action = [=]() -> int {
      if (flags->recipe == kModelRecipe && flags->model.empty() && flags->config_file.empty()) {
        return session->Usage("recipe from_hf needs the model: --hf DIR, a directory with a config.json");
      }
      v1::JobSpec spec;
      spec.set_recipe(flags->recipe);
      spec.set_ranks(flags->ranks);
      for (const std::string& line : flags->overrides) spec.add_overrides(line);
      if (!flags->config_file.empty()) {
        std::ifstream file(flags->config_file, std::ios::binary);
        std::stringstream text;
        text << file.rdbuf();
        if (!file) return session->Usage(fmt::format("cannot read the --config file {}", flags->config_file));
        spec.set_config_yaml(text.str());
      }
      if (!flags->model.empty()) {
        const absl::Status added = AddModel(session, flags->model, flags->local, &spec);
        if (!added.ok()) return session->Fail(added);
      }
      v1::ShowRecipeResponse answer;
      if (flags->local) {
        MBCTL_ASSIGN_OR_FAIL(*answer.mutable_recipe(), *session, recipes::FindRecipe(spec.recipe()));
        MBCTL_ASSIGN_OR_FAIL(*answer.mutable_resolved(), *session, ResolveLocally(spec, false));
      } else {
        v1::ShowRecipeRequest request;
        request.set_recipe(spec.recipe());
        request.set_config_yaml(spec.config_yaml());
        *request.mutable_overrides() = spec.overrides();
        request.set_ranks(spec.ranks());
        MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
        MBCTL_ASSIGN_OR_FAIL(answer, *session, client->ShowRecipe(request));
      }
      if (session->format == "yaml") {
        session->out << recipes::ToYaml(answer.resolved()) << std::flush;
        return client::kExitOk;
      }
      return session->Print(answer, answer.recipe().name(), [&] {
        const v1::Recipe& recipe = answer.recipe();
        std::string text = recipe.description() + "\n";
        if (!recipe.trainable()) text += fmt::format("not trainable in this version: {}\n", recipe.not_trainable_reason());
        return text + DescribeResolved(answer.resolved(), flags->all) + DescribeDifferences(recipe, answer.resolved());
      });
    };
  });
}

void AddKeys(CLI::App* group, Session* session) {
  auto pattern = std::make_shared<std::string>();
  auto* command = group->add_subcommand("keys", "List configuration keys with type, default, range and Megatron-LM flag");
  command->add_option("PATTERN", *pattern, "Part of a key or of its help");
  command->callback([=] {
    session->action = [=]() -> int {
      const auto keys = recipes::DescribeKeys(*pattern);
      if (keys.empty()) {
        session->Say(fmt::format("no key contains '{}'", *pattern));
        return client::kExitNotFound;
      }
      if (session->format == "name") {
        for (const auto& key : keys) session->out << key.key << '\n';
      } else if (session->format == "table") {
        Table table({"KEY", "TYPE", "DEFAULT", "RANGE", "FLAG", "HELP"});
        for (const auto& key : keys) {
          table.Add({key.key, key.type, key.default_value, key.range, key.mlm_flag,
                     key.effect.empty() ? key.help : fmt::format("[{}] {}", key.effect, key.help)});
        }
        session->out << table.Text();
      } else {
        nlohmann::ordered_json list = nlohmann::ordered_json::array();
        for (const auto& key : keys) {
          list.push_back({{"key", key.key},
                          {"type", key.type},
                          {"default", key.default_value},
                          {"range", key.range},
                          {"mlmFlag", key.mlm_flag},
                          {"effect", key.effect},
                          {"help", key.help}});
        }
        session->out << (session->json() ? list.dump(2) + "\n" : JsonToYaml(list.dump()));
      }
      session->out.flush();
      return client::kExitOk;
    };
  });
}

}  // namespace

void AddRecipes(CLI::App* app, Session* session) {
  auto* group = app->add_subcommand("recipe", "Recipes and configuration keys: ls, show, keys");
  group->require_subcommand(1);
  AddList(group, session);
  AddShow(group, session);
  AddKeys(group, session);
}

}  // namespace mbridge::mbctl
