// The program without its main: a command line in, an exit code out.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace mbridge::mbctl {

class Session;

// The command tree on `session`.
std::unique_ptr<CLI::App> MakeApp(Session* session);

// Commands below `level`, in their order.
std::vector<std::string> CommandNames(const CLI::App& level);

// Parses and runs `mbctl ARGUMENTS...`. Never throws.
int RunCommandLine(Session* session, std::vector<std::string> arguments);

}  // namespace mbridge::mbctl
