#include "client/mbctl/completion.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <ostream>
#include <vector>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/session.h"

namespace mbridge::mbctl {
namespace {

struct Command {
  std::string path;  // "ckpt ls"; empty for the program.
  std::vector<std::string> subcommands;
  std::vector<std::string> options;  // "--rank", "-f".
  bool takes_overrides = false;
  bool takes_job = false;
};

std::vector<const CLI::App*> Children(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* child) { return !child->get_name().empty(); });
}

void Collect(const CLI::App& app, const std::string& path, std::vector<Command>* out) {
  Command command{path, {}, {}, false, false};
  for (const CLI::App* child : Children(app)) command.subcommands.push_back(child->get_name());
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) command.options.push_back("--" + name);
    for (const std::string& name : option->get_snames()) command.options.push_back("-" + name);
    if (!option->get_positional()) continue;
    command.takes_overrides |= option->get_name(true) == "OVERRIDES";
    command.takes_job |= option->get_name(true) == "JOB" || option->get_name(true) == "FROM";
  }
  out->push_back(command);
  for (const CLI::App* child : Children(app))
    Collect(*child, path.empty() ? child->get_name() : path + " " + child->get_name(), out);
}

std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// A description inside single quotes of a shell.
std::string Quoted(const std::string& text) {
  std::string quoted;
  for (const char c : text) quoted += c == '\'' ? ' ' : c == '\n' ? ' ' : c;
  return "'" + quoted + "'";
}

}  // namespace

std::string BashCompletion(const CLI::App& root) {
  std::vector<Command> commands;
  Collect(root, "", &commands);
  std::string names, cases, overrides, jobs;
  for (const Command& command : commands) {
    cases += fmt::format("    '{}') words='{}' ;;\n", command.path,
                         Join(command.subcommands) + (command.subcommands.empty() ? "" : " ") + Join(command.options));
    if (!command.path.empty()) names += fmt::format("    '{}') path=\"$next\" ;;\n", command.path);
    if (command.takes_overrides) overrides += fmt::format("{}'{}'", overrides.empty() ? "" : " | ", command.path);
    if (command.takes_job) jobs += fmt::format("{}'{}'", jobs.empty() ? "" : " | ", command.path);
  }
  return fmt::format(R"BASH(# bash completion of mbctl; load it with: source <(mbctl completion bash)
_mbctl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path='' words='' next='' i
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="${{path:+$path }}${{COMP_WORDS[i]}}"
    case "$next" in
{}    esac
  done
  case "$previous" in
    -r | --recipe) COMPREPLY=($(compgen -W "$(mbctl recipe ls --local -o name 2>/dev/null)" -- "$current")); return ;;
    -o | --output) COMPREPLY=($(compgen -W 'table json yaml name' -- "$current")); return ;;
    -c | --config | --ca | --cert | --key) COMPREPLY=($(compgen -f -- "$current")); return ;;
    --start) COMPREPLY=($(compgen -W 'fresh resume fork' -- "$current")); return ;;
    --device) COMPREPLY=($(compgen -W 'auto cpu cuda' -- "$current")); return ;;
  esac
  case "$path" in
{}  esac
  if [[ "$current" != -* ]]; then
    case "$path" in
      {}) words="$words $(mbctl recipe keys -o name 2>/dev/null | sed 's/$/=/')" ;;
    esac
    case "$path" in
      {}) words="$words $(MBCTL_RECONNECT_SECONDS=1 mbctl ps -a -o name 2>/dev/null)" ;;
      'recipe show') words="$words $(mbctl recipe ls --local -o name 2>/dev/null)" ;;
      compare) COMPREPLY=($(compgen -f -- "$current")) ;;
    esac
  fi
  COMPREPLY+=($(compgen -W "$words" -- "$current"))
  [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  return 0
}}
complete -F _mbctl mbctl
)BASH",
                     names, cases, overrides, jobs);
}

std::string ZshCompletion(const CLI::App& root) {
  return "#compdef mbctl\n# zsh completion of mbctl; load it with: source <(mbctl completion zsh)\n"
         "autoload -U +X bashcompinit && bashcompinit\n" +
         BashCompletion(root);
}

std::string FishCompletion(const CLI::App& root) {
  std::vector<Command> commands;
  Collect(root, "", &commands);
  std::string text = "# fish completion of mbctl; load it with: mbctl completion fish | source\ncomplete -c mbctl -f\n";
  const std::function<void(const CLI::App&, const std::string&, const std::string&)> write =
      [&](const CLI::App& app, const std::string& condition, const std::string& path) {
        std::string names;
        for (const CLI::App* child : Children(app)) names += (names.empty() ? "" : " ") + child->get_name();
        for (const CLI::App* child : Children(app)) {
          const std::string not_yet = path.empty() ? "__fish_use_subcommand"
                                                   : fmt::format("{}; and not __fish_seen_subcommand_from {}", condition, names);
          text += fmt::format("complete -c mbctl -n '{}' -a {} -d {}\n", not_yet, child->get_name(),
                              Quoted(child->get_description()));
        }
        for (const CLI::Option* option : app.get_options()) {
          std::string flags;
          for (const std::string& name : option->get_snames()) flags += " -s " + name;
          for (const std::string& name : option->get_lnames()) flags += " -l " + name;
          if (flags.empty()) continue;
          if (option->get_expected_max() > 0 && option->get_type_size() > 0) flags += " -r";
          text += fmt::format("complete -c mbctl{}{} -d {}\n", condition.empty() ? "" : " -n '" + condition + "'", flags,
                              Quoted(option->get_description()));
        }
        for (const CLI::App* child : Children(app)) {
          const std::string seen = "__fish_seen_subcommand_from " + child->get_name();
          write(*child, condition.empty() ? seen : condition + "; and " + seen, child->get_name());
        }
      };
  write(root, "", "");
  text +=
      "complete -c mbctl -n '__fish_seen_subcommand_from submit bench' -s r -l recipe -x -a '(mbctl recipe ls --local -o name "
      "2>/dev/null)'\n";
  return text;
}

void AddCompletion(CLI::App* app, Session* session) {
  auto* group = app->add_subcommand("completion", "Print a completion script: bash, zsh or fish");
  group->require_subcommand(1);
  using Make = std::string (*)(const CLI::App&);
  const std::pair<const char*, Make> shells[] = {{"bash", BashCompletion}, {"zsh", ZshCompletion}, {"fish", FishCompletion}};
  for (const auto& [shell, make] : shells) {
    auto* command = group->add_subcommand(shell, std::string("Script for ") + shell);
    command->callback([=, make = make] {
      session->action = [=] {
        session->out << make(*app) << std::flush;
        return client::kExitOk;
      };
    });
  }
}

}  // namespace mbridge::mbctl
