#include "worker/spool/attempt_directory.h"

#include <charconv>
#include <filesystem>
#include <set>
#include <string_view>

#include <fmt/format.h>

namespace mbridge::spool {

std::string AttemptDirectory::RankPath(int rank, const char* extension) const {
  return fmt::format("{}/rank-{}.{}", path_, rank, extension);
}

namespace {

// Ranks of the files "rank-<r>.<extension>" of a directory; an empty extension stands for all.
std::vector<int> RanksOf(const std::string& path, std::string_view extension) {
  constexpr std::string_view kPrefix = "rank-";
  std::set<int> ranks;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    const size_t dot = name.find('.');
    if (!name.starts_with(kPrefix) || dot == std::string::npos) continue;
    if (!extension.empty() && std::string_view(name).substr(dot + 1) != extension) continue;
    int rank = -1;
    const auto [stop, failure] = std::from_chars(name.data() + kPrefix.size(), name.data() + dot, rank);
    if (failure == std::errc() && stop == name.data() + dot && rank >= 0) ranks.insert(rank);
  }
  return {ranks.begin(), ranks.end()};
}

}  // namespace

std::vector<int> AttemptDirectory::Ranks() const { return RanksOf(path_, "spec"); }

std::vector<int> AttemptDirectory::RanksWithFiles() const { return RanksOf(path_, ""); }

}  // namespace mbridge::spool
