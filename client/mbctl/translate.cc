// translate: a Megatron-LM argument line as recipe and overrides, and back with --reverse.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/dry_run.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "recipes/config/text_form.h"
#include "recipes/config/translate.h"

namespace mbridge::mbctl {
namespace {

struct TranslateFlags {
  bool reverse = false;
  std::string file, recipe, config_file;
  int ranks = 0;
};

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::stringstream text;
  if (path == "-") {
    text << std::cin.rdbuf();
    return text.str();
  }
  std::ifstream file(path, std::ios::binary);
  text << file.rdbuf();
  if (!file) return absl::InvalidArgumentError(fmt::format("cannot read {}", path));
  return text.str();
}

// "--num-layers 2" in quotes is a piece of the line; "--load=/a b" and "/a b" are words.
bool IsLine(const std::string& word) { return word.starts_with("--") && word.find(' ') < word.find('='); }

int PrintTranslation(Session* session, const std::string& command_line, const std::vector<std::string>& notes,
                     const nlohmann::ordered_json& json) {
  for (const std::string& note : notes) session->Say("note: " + note);
  if (session->format == "json") {
    session->out << json.dump(2) << std::endl;
  } else if (session->format == "yaml") {
    session->out << JsonToYaml(json.dump()) << std::flush;
  } else {
    session->out << command_line << std::endl;
  }
  return client::kExitOk;
}

int FromMegatron(Session* session, const TranslateFlags& flags, const std::vector<std::string>& words) {
  std::string line;
  if (!flags.file.empty()) {
    MBCTL_ASSIGN_OR_FAIL(line, *session, ReadText(flags.file));
  } else if (words.size() == 1) {
    line = words.front();  // A whole line in quotes.
  } else {
    for (const std::string& word : words) line += (line.empty() ? "" : " ") + (IsLine(word) ? word : recipes::ShellQuote(word));
  }
  if (line.find_first_not_of(" \t\n") == std::string::npos) {
    return session->Usage("give Megatron-LM's arguments after `mbctl translate`, or --file FILE\nnext: mbctl translate --help");
  }
  MBCTL_ASSIGN_OR_FAIL(const recipes::Translation translation, *session, recipes::TranslateFromMegatron(line));
  return PrintTranslation(session, translation.CommandLine(), translation.notes,
                          {{"recipe", translation.recipe},
                           {"overrides", translation.overrides},
                           {"ranks", translation.ranks},
                           {"notes", translation.notes},
                           {"commandLine", translation.CommandLine()}});
}

int ToMegatron(Session* session, const TranslateFlags& flags, const std::vector<std::string>& overrides) {
  if (flags.recipe.empty() && flags.config_file.empty()) return session->Usage("--reverse needs --recipe or --config");
  v1::JobSpec spec;
  spec.set_recipe(flags.recipe);
  spec.set_ranks(flags.ranks);
  for (const std::string& line : overrides) spec.add_overrides(line);
  if (!flags.config_file.empty()) {
    MBCTL_ASSIGN_OR_FAIL(*spec.mutable_config_yaml(), *session, ReadText(flags.config_file));
  }
  MBCTL_ASSIGN_OR_FAIL(const v1::ResolvedConfig resolved, *session, ResolveLocally(spec, false));
  const recipes::MegatronLine line = recipes::TranslateToMegatron(resolved);
  return PrintTranslation(session, line.CommandLine(), line.notes,
                          {{"arguments", line.arguments}, {"notes", line.notes}, {"commandLine", line.CommandLine()}});
}

}  // namespace

void AddTranslate(CLI::App* app, Session* session) {
  auto flags = std::make_shared<TranslateFlags>();
  auto* command = app->add_subcommand("translate", "Megatron-LM arguments to a submit line; --reverse: back");
  command->add_flag("--reverse", flags->reverse, "From --recipe, --config and key=value to Megatron-LM arguments");
  command->add_option("--file", flags->file, "Read the Megatron-LM line from a file or script; - is stdin")->type_name("FILE");
  command->add_option("-r,--recipe", flags->recipe, "With --reverse");
  command->add_option("-c,--config", flags->config_file, "With --reverse")->type_name("FILE");
  command->add_option("--ranks", flags->ranks, "With --reverse");
  // Everything from the first word that is not one of these options belongs to Megatron-LM.
  command->prefix_command();
  command->fallthrough(false);
  command->footer(
      "Options of mbctl itself come first: mbctl -o json translate ...\n"
      "Examples:\n"
      "  mbctl translate --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --bf16 ...\n"
      "  mbctl translate --file pretrain.sh\n"
      "  mbctl translate --reverse --recipe vanilla_gpt_pretrain_config model.num_layers=2\n"
      "Unknown flags are errors; docs/megatron-lm.md has the whole table.");
  command->callback([=] {
    session->action = [=] {
      const auto words = command->remaining();
      return flags->reverse ? ToMegatron(session, *flags, words) : FromMegatron(session, *flags, words);
    };
  });
}

}  // namespace mbridge::mbctl
