// Shell completion scripts, made from the command tree.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace mbridge::mbctl {

// A whole script. Subcommands and options come from `root`; recipe names, configuration keys and live jobs are asked of
// mbctl itself when completing.
std::string BashCompletion(const CLI::App& root);
std::string ZshCompletion(const CLI::App& root);
std::string FishCompletion(const CLI::App& root);

}  // namespace mbridge::mbctl
