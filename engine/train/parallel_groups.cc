#include "engine/train/parallel_groups.h"

#include "engine/core/error.h"

namespace mbridge {

ParallelGroups::ParallelGroups(const ParallelSizes& sizes, Communicator* world) : sizes_(sizes), world_(world) {
  if (const std::string problem = CheckParallelSizes(sizes, world->size()); !problem.empty())
    throw EngineError(v1::REASON_INVALID_CONFIG, problem);
  tensor_ = Group(GroupKind::kTensor, "tensor");
  data_ = Group(GroupKind::kDataContext, "data");
}

Communicator* ParallelGroups::Group(GroupKind kind, const char* name) {
  const std::vector<int> ranks = ProcessGroupOf(sizes_, kind, world_->rank());
  if (static_cast<int>(ranks.size()) == world_->size()) return world_;
  owned_.push_back(world_->Split(ranks, name));
  return owned_.back().get();
}

}  // namespace mbridge
