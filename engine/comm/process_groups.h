// Which ranks form which groups: Megatron-Core's rank order "tp-cp-ep-dp-pp" (megatron/core/parallel_state.py), the first named
// dimension varies fastest. Dense layers see tp-cp-dp-pp; experts see etp-ep-edp-pp on the same ranks. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mbridge {

struct ParallelSizes {
  int tensor = 1;
  int context = 1;
  int data = 1;  // The quotient: world / (tensor * context * pipeline).
  int pipeline = 1;
  int expert = 1;
  int expert_tensor = 1;  // model.expert_tensor_parallel_size, the tensor size unless it is set.

  int world() const { return tensor * context * data * pipeline; }
  int expert_data() const { return world() / (expert_tensor * expert * pipeline); }
};

// Empty, or what is wrong with the sizes for this world, naming the keys.
std::string CheckParallelSizes(const ParallelSizes& sizes, int world_size);

enum class GroupKind : uint8_t {
  kTensor,
  kContext,
  kData,
  kPipeline,
  kDataContext,  // Gradients and distributed optimizer of dense parameters.
  kTensorContext,
  kTensorPipeline,  // "Model parallel": gradient norm of dense parameters.
  kTensorDataContext,
  kExpert,
  kExpertTensor,
  kExpertData,                  // Gradients and distributed optimizer of expert parameters.
  kExpertTensorExpertPipeline,  // Gradient norm of expert parameters.
};

// All groups of a kind, each in ascending rank order, sorted by their first rank. Every rank is in exactly one of them.
std::vector<std::vector<int>> ProcessGroups(const ParallelSizes& sizes, GroupKind kind);
// The group of a kind that holds `rank`.
std::vector<int> ProcessGroupOf(const ParallelSizes& sizes, GroupKind kind, int rank);

struct RankCoordinates {
  int tensor = 0, context = 0, data = 0, pipeline = 0, expert = 0, expert_tensor = 0, expert_data = 0;
  bool operator==(const RankCoordinates&) const = default;
};
RankCoordinates CoordinatesOf(const ParallelSizes& sizes, int rank);

}  // namespace mbridge
