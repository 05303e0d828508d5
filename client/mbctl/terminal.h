// What the terminal can do: decides about colour, the progress line and the width of plots.
#pragma once

#include <string>

#include "client/lib/connection.h"

namespace mbridge::mbctl {

struct Terminal {
  bool out_is_terminal = false;
  bool err_is_terminal = false;
  bool in_is_terminal = false;
  bool color = false;     // Of stdout: a terminal, no NO_COLOR, no TERM=dumb; FORCE_COLOR overrules.
  bool progress = false;  // A redrawn line on stderr: a terminal, no TERM=dumb.
  bool unicode = false;   // The locale is UTF-8.
  int width = 80;         // COLUMNS, else the terminal's, else 80; 20..500.
};

// The rules on given facts; `window_width` 0 = unknown.
Terminal DescribeTerminal(bool in_is_terminal, bool out_is_terminal, bool err_is_terminal, int window_width,
                          const client::Environment& environment);
// Of this process.
Terminal ProcessTerminal();

// `text` in an ANSI colour ("31" red, "32" green, "1" bold) where the terminal shows colours.
std::string Colored(const Terminal& terminal, const char* code, const std::string& text);

}  // namespace mbridge::mbctl
