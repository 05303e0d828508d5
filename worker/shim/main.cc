// mbshim --spec <attempt directory>/rank-<r>.spec --program <rank program>
#include <cstdio>
#include <string_view>

#include "proto/rpc/version.h"
#include "worker/shim/shim.h"

namespace {

constexpr int kUsage = 2;
constexpr int kClaimed = 3;
constexpr int kFailed = 4;

}  // namespace

int main(int argc, char** argv) {
  mbridge::shim::ShimOptions options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (flag == "--spec") options.spec_path = argv[i + 1];
    if (flag == "--program") options.program = argv[i + 1];
  }
  const std::string_view first = argc == 2 ? argv[1] : "";
  if (first == "--version") return std::puts(mbridge::VersionLine("mbshim").c_str()) < 0 ? kFailed : 0;
  if (first == "--help") {
    std::puts("usage: mbshim --spec PATH --program PATH\nStarted by mbagent; not meant to be run by hand.");
    return 0;
  }
  if (argc != 5 || options.spec_path.empty() || options.program.empty()) {
    std::fprintf(stderr, "usage: mbshim --spec PATH --program PATH\nStarted by mbagent; not meant to be run by hand.\n");
    return kUsage;
  }
  const absl::Status status = mbridge::shim::RunRank(options);
  if (status.ok()) return 0;
  if (status.code() == absl::StatusCode::kAlreadyExists) return kClaimed;  // Nothing to say into the other shim's log.
  std::fprintf(stderr, "mbshim: %s\n", std::string(status.message()).c_str());
  return kFailed;
}
