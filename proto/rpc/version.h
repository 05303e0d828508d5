// Which build a program is; shown by --version, GetServerInfo, the node inventory and mb_build_info.
#pragma once

#include <string>

namespace mbridge {

// The project's version, for example "0.1.0".
std::string VersionString();
// `git describe --always --dirty` of the source tree at build time, "unknown" outside a git checkout.
std::string BuildId();
// "NAME 0.1.0 (build f5d07ee)": the line that `NAME --version` prints.
std::string VersionLine(const std::string& program);

}  // namespace mbridge
