// What the implementations of Communicator::Split share.
#pragma once

#include <string>
#include <vector>

namespace mbridge {

struct GroupPart {
  std::string group;  // The rendezvous name of the part.
  int rank = 0;       // Of the caller, in the part.
  int size = 1;
};

// The part `ranks` of a group of `size` ranks, as its rank `rank` sees it. Throws EngineError unless the ranks ascend, lie in the
// group and hold `rank`.
GroupPart PartOfGroup(const std::string& group, int rank, int size, const std::vector<int>& ranks, const std::string& name);

}  // namespace mbridge
