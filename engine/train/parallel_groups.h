// The communicators of one rank of a job.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/comm/process_groups.h"

namespace mbridge {

// Built on every rank together; `world` outlives it. A group of all ranks is `world` itself.
class ParallelGroups {
 public:
  // Throws EngineError: INVALID_CONFIG for sizes that do not fit the number of ranks, PEER_LOST, COLLECTIVE_TIMEOUT.
  ParallelGroups(const ParallelSizes& sizes, Communicator* world);

  Communicator* world() const { return world_; }
  Communicator* tensor() const { return tensor_; }
  Communicator* data() const { return data_; }
  const ParallelSizes& sizes() const { return sizes_; }

 private:
  Communicator* Group(GroupKind kind, const char* name);

  ParallelSizes sizes_;
  Communicator* world_;
  std::vector<std::unique_ptr<Communicator>> owned_;
  Communicator *tensor_, *data_;
};

}  // namespace mbridge
