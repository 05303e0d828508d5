#include "worker/spool/attempt_directory.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

namespace mbridge::spool {

std::string AttemptDirectory::RankPath(int rank, const char* extension) const {
  return fmt::format("{}/rank-{}.{}", path_, rank, extension);
}

std::vector<int> AttemptDirectory::Ranks() const {
  constexpr std::string_view kPrefix = "rank-";
  constexpr std::string_view kSuffix = ".spec";
  std::vector<int> ranks;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) continue;
    int rank = -1;
    const char* last = name.data() + name.size() - kSuffix.size();
    const auto [stop, failure] = std::from_chars(name.data() + kPrefix.size(), last, rank);
    if (failure == std::errc() && stop == last && rank >= 0) ranks.push_back(rank);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace mbridge::spool
