// data: a subcommand of mbrank, which holds the engine; mbctl only finds and starts it.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "client/mbctl/commands.h"
#include "client/mbctl/session.h"

namespace mbridge::mbctl {
namespace {

// mbrank in the directory of this program, else the one of PATH.
std::string FindRankProgram() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const auto beside = self.parent_path() / "mbrank";
    if (access(beside.c_str(), X_OK) == 0) return beside;
  }
  return "mbrank";
}

}  // namespace

void AddData(CLI::App* app, Session* session) {
  auto* command = app->add_subcommand(
      "data", "Training data on this machine: preprocess (JSONL or text to .bin/.idx), inspect PREFIX; runs mbrank");
  command->prefix_command();
  command->set_help_flag();  // mbrank has its own.
  command->fallthrough(false);
  command->callback([=] {
    session->action = [=]() -> int {
      std::vector<std::string> arguments = {FindRankProgram(), "data"};
      for (const std::string& argument : command->remaining()) arguments.push_back(argument);
      std::vector<char*> pointers;
      for (std::string& argument : arguments) pointers.push_back(argument.data());
      pointers.push_back(nullptr);
      execvp(pointers[0], pointers.data());
      return session->Usage("cannot start mbrank (" + std::string(std::strerror(errno)) +
                            "); it must stand beside mbctl or in PATH");
    };
  });
}

}  // namespace mbridge::mbctl
