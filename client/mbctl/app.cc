#include "client/mbctl/app.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/follow.h"
#include "client/mbctl/session.h"
#include "client/mbctl/submit.h"
#include "proto/rpc/version.h"
#include "recipes/config/schema.h"
#include "recipes/config/word_option.h"

namespace mbridge::mbctl {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  mbctl submit --recipe vanilla_gpt_megatron_lm_config --follow model.num_layers=2 model.hidden_size=256 \\\n"
    "    model.num_attention_heads=4 train.train_iters=10\n"
    "  mbctl ps                        what runs\n"
    "  mbctl metrics JOB --plot        its loss\n"
    "  mbctl resume JOB                go on from its last checkpoint\n"
    "  mbctl compare JOB megatron.log  beside Megatron-LM\n"
    "More: mbctl COMMAND --help, mbctl help exit-codes, mbctl help errors\n"
    "Environment: MBCTL_SERVER, MBCTL_CONTEXT, MBCTL_CONFIG, MBCTL_TLS, MBCTL_CA, MBCTL_CERT, MBCTL_KEY, MB_STATE_DIR,\n"
    "MBCTL_RECONNECT_SECONDS (how long a follower looks for a lost coordinator; 60), NO_COLOR, COLUMNS";

void AddGlobalOptions(CLI::App* app, Session* session) {
  client::ConnectionFlags* connection = &session->connection;
  const char* group = "Global options";
  app->add_option("-o,--output", session->format, "table, json, yaml or name")
      ->check(recipes::OneOf({"table", "json", "yaml", "name"}))
      ->group(group);
  app->add_option("--server", connection->server, "Coordinator: HOST:PORT or unix:/path")->type_name("ADDRESS")->group(group);
  app->add_option("--context", connection->context, "Context of ~/.config/mbctl/config.yaml")->group(group);
  app->add_flag_callback(
         "--tls", [connection] { connection->tls = true; }, "Encrypt; implied by --ca and --cert")
      ->group(group);
  app->add_option("--ca", connection->ca_file, "CA certificate, PEM")->type_name("FILE")->group(group);
  app->add_option("--cert", connection->cert_file, "Client certificate, PEM")->type_name("FILE")->group(group);
  app->add_option("--key", connection->key_file, "Client key, PEM")->type_name("FILE")->group(group);
  app->add_flag("-q,--quiet", session->quiet, "No prose on stderr but errors")->group(group);
  app->add_flag_callback(
         "--no-color", [session] { session->terminal.color = false; }, "No colours")
      ->group(group);
}

bool IsFlag(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

std::string ExplainCommand(const std::string& word, const CLI::App& level) {
  return fmt::format("there is no command '{}'{}", word, recipes::DidYouMean(word, CommandNames(level)));
}

// `word` may hold its value: --name=x. Letters alone are too short to be near anything.
std::string ExplainFlag(const std::string& word, const CLI::App& root, const CLI::App& level) {
  constexpr size_t kShortest = 5;
  const std::string flag = word.substr(0, word.find('='));
  std::vector<std::string> names;
  for (const CLI::App* app : {&level, &root}) {
    for (const CLI::Option* option : app->get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  return fmt::format("there is no option {}{}", flag, flag.size() < kShortest ? "" : recipes::DidYouMean(flag, names));
}

// CLI11 says "A subcommand is required" for a mistyped one, and of two faults the one that follows from the other.
std::string Explain(const CLI::ParseError& error, const CLI::App& root, const CLI::App& level) {
  if (level.get_prefix_command()) return error.what();  // Its words are another program's.
  auto words = level.remaining();
  for (std::string& word : root.remaining()) words.push_back(std::move(word));  // They fell through, as global options do.
  const auto flag = std::find_if(words.begin(), words.end(), IsFlag);
  const auto word = std::find_if_not(words.begin(), words.end(), IsFlag);
  if (level.get_require_subcommand_min() > 0 && word != words.end()) return ExplainCommand(*word, level);
  return flag != words.end() ? ExplainFlag(*flag, root, level) : error.what();
}

}  // namespace

std::vector<std::string> CommandNames(const CLI::App& level) {
  std::vector<std::string> names;
  for (const CLI::App* child : level.get_subcommands([](const CLI::App*) { return true; })) names.push_back(child->get_name());
  return names;
}

std::unique_ptr<CLI::App> MakeApp(Session* session) {
  auto app = std::make_unique<CLI::App>("Train language models on a coordinator: submit, watch, stop, compare.", "mbctl");
  app->footer(kFooter);
  app->require_subcommand(1);
  // Global options may stand after the command too.
  app->fallthrough();
  app->set_version_flag("--version", VersionLine("mbctl"));
  AddGlobalOptions(app.get(), session);
  AddSubmit(app.get(), session);
  AddFollow(app.get(), session);
  AddJobs(app.get(), session);
  AddLogs(app.get(), session);
  AddMetrics(app.get(), session);
  AddResume(app.get(), session);
  AddFork(app.get(), session);
  AddCheckpoints(app.get(), session);
  AddRecipes(app.get(), session);
  AddCompare(app.get(), session);
  AddTranslate(app.get(), session);
  AddNodes(app.get(), session);
  AddData(app.get(), session);
  AddBench(app.get(), session);
  AddConvert(app.get(), session);
  AddAdmin(app.get(), session);
  AddCompletion(app.get(), session);
  AddHelp(app.get(), session);
  return app;
}

int RunCommandLine(Session* session, std::vector<std::string> arguments) {
  const auto app = MakeApp(session);
  if (arguments.empty()) {
    session->err << app->help() << std::flush;
    return client::kExitInvalid;
  }
  // CLI11 takes what follows "--" for named positionals, and translate has none: its words are Megatron-LM's.
  const auto translate = std::find(arguments.begin(), arguments.end(), "translate");
  const auto dashes = std::find(translate, arguments.end(), "--");
  if (dashes != arguments.end()) arguments.erase(dashes);
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first.
    app->parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version.
      app->exit(error, session->out, session->err);
      return client::kExitOk;
    }
    const CLI::App* level = app.get();
    std::string command = "mbctl";
    while (!level->get_subcommands().empty()) {
      level = level->get_subcommands().front();
      command += " " + level->get_name();
    }
    return session->Usage(fmt::format("{}\nnext: {} --help", Explain(error, *app, *level), command));
  }
  try {
    return session->action ? session->action() : session->Usage("nothing to do; mbctl --help");
  } catch (const std::exception& error) {
    session->err << "mbctl: defect: " << error.what() << std::endl;
    return client::kExitJobFailed;
  }
}

}  // namespace mbridge::mbctl
