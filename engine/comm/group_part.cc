#include "engine/comm/group_part.h"

#include <algorithm>

#include "engine/core/error.h"

namespace mbridge {

GroupPart PartOfGroup(const std::string& group, int rank, int size, const std::vector<int>& ranks, const std::string& name) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  if (own == ranks.end() || !std::is_sorted(ranks.begin(), ranks.end()) || ranks.front() < 0 || ranks.back() >= size)
    ThrowEngineError("rank {} of {} is not in its part \"{}\" of group {}", rank, size, name, group);
  return {fmt::format("{}.{}.{}", group, name, ranks.front()), static_cast<int>(own - ranks.begin()),
          static_cast<int>(ranks.size())};
}

}  // namespace mbridge
