#include "proto/rpc/state_directory.h"

#include <cstdlib>

#include <unistd.h>

namespace mbridge {

std::optional<std::string> ProcessEnvironment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

std::string DefaultStateDirectory(const Environment& environment) {
  if (auto directory = environment("MB_STATE_DIR"); directory && !directory->empty()) return *directory;
  if (geteuid() == 0) return "/var/lib/mbridge";
  if (auto state = environment("XDG_STATE_HOME"); state && !state->empty()) return *state + "/mbridge";
  const auto home = environment("HOME");
  return (home && !home->empty() ? *home : ".") + "/.local/state/mbridge";
}

}  // namespace mbridge
