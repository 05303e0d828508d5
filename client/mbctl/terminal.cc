#include "client/mbctl/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace mbridge::mbctl {

Terminal DescribeTerminal(bool in_is_terminal, bool out_is_terminal, bool err_is_terminal, int window_width,
                          const client::Environment& environment) {
  const auto set = [&](const char* name) {
    const auto value = environment(name);
    return value.has_value() && !value->empty();
  };
  Terminal terminal;
  terminal.in_is_terminal = in_is_terminal;
  terminal.out_is_terminal = out_is_terminal;
  terminal.err_is_terminal = err_is_terminal;
  const bool dumb = environment("TERM").value_or("") == "dumb";
  // no-color.org: present and not empty. An empty value is honoured too: nobody sets it by accident.
  const bool no_color = environment("NO_COLOR").has_value();
  const bool forced = set("FORCE_COLOR") || set("CLICOLOR_FORCE");
  terminal.color = !no_color && (forced || (out_is_terminal && !dumb));
  terminal.progress = err_is_terminal && !dumb;
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (!set(name)) continue;
    std::string locale = *environment(name);
    std::transform(locale.begin(), locale.end(), locale.begin(), [](unsigned char c) { return std::tolower(c); });
    terminal.unicode = locale.find("utf-8") != std::string::npos || locale.find("utf8") != std::string::npos;
    break;
  }
  int width = window_width;
  if (set("COLUMNS")) width = std::atoi(environment("COLUMNS")->c_str());
  terminal.width = width <= 0 ? 80 : std::clamp(width, 20, 500);
  return terminal;
}

Terminal ProcessTerminal() {
  winsize size{};
  const int fd = isatty(STDOUT_FILENO) ? STDOUT_FILENO : STDERR_FILENO;
  const int width = ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
  return DescribeTerminal(isatty(STDIN_FILENO), isatty(STDOUT_FILENO), isatty(STDERR_FILENO), width, client::ProcessEnvironment);
}

std::string Colored(const Terminal& terminal, const char* code, const std::string& text) {
  if (!terminal.color) return text;
  return std::string("\x1b[") + code + "m" + text + "\x1b[0m";
}

}  // namespace mbridge::mbctl
