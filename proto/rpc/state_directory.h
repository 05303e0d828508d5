// Where the service of this machine keeps its state: the coordinator makes it there, and clients look for its socket there.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace mbridge {

// The value of a variable; none where it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> ProcessEnvironment(const std::string& name);

// MB_STATE_DIR, else /var/lib/mbridge for root, else $XDG_STATE_HOME/mbridge or ~/.local/state/mbridge; without HOME beneath the
// working directory. Empty variables count as not set.
std::string DefaultStateDirectory(const Environment& environment);

}  // namespace mbridge
