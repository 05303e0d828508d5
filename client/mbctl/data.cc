// data: a subcommand of mbrank, which holds the engine; mbctl only finds and starts it.
#include <CLI/CLI.hpp>
#include <vector>

#include "client/mbctl/commands.h"
#include "client/mbctl/rank_program.h"
#include "client/mbctl/session.h"

namespace mbridge::mbctl {

void AddData(CLI::App* app, Session* session) {
  auto* command = app->add_subcommand(
      "data", "Training data on this machine: preprocess (JSONL or text to .bin/.idx), inspect PREFIX; runs mbrank");
  command->prefix_command();
  command->set_help_flag();  // mbrank has its own.
  command->fallthrough(false);
  command->callback([=] {
    session->action = [=]() -> int {
      std::vector<std::string> arguments = {"data"};
      for (const std::string& argument : command->remaining()) arguments.push_back(argument);
      return session->Fail(BecomeRankProgram(arguments));
    };
  });
}

}  // namespace mbridge::mbctl
