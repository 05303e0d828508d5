#include "engine/comm/process_groups.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace mbridge {
namespace {

// A grid of four dimensions over the ranks, the first varies fastest, and which of them a group spans.
struct Grid {
  std::array<int, 4> sizes;
  std::array<bool, 4> spans;
};

Grid GridOf(const ParallelSizes& s, GroupKind kind) {
  const std::array<int, 4> dense = {s.tensor, s.context, s.data, s.pipeline};
  const std::array<int, 4> expert = {s.expert_tensor, s.expert, s.expert_data(), s.pipeline};
  switch (kind) {
    case GroupKind::kTensor: return {dense, {true, false, false, false}};
    case GroupKind::kContext: return {dense, {false, true, false, false}};
    case GroupKind::kData: return {dense, {false, false, true, false}};
    case GroupKind::kPipeline: return {dense, {false, false, false, true}};
    case GroupKind::kDataContext: return {dense, {false, true, true, false}};
    case GroupKind::kTensorContext: return {dense, {true, true, false, false}};
    case GroupKind::kTensorPipeline: return {dense, {true, false, false, true}};
    case GroupKind::kTensorDataContext: return {dense, {true, true, true, false}};
    case GroupKind::kExpertTensor: return {expert, {true, false, false, false}};
    case GroupKind::kExpert: return {expert, {false, true, false, false}};
    case GroupKind::kExpertData: return {expert, {false, false, true, false}};
    case GroupKind::kExpertTensorExpertPipeline: return {expert, {true, true, false, true}};
  }
  return {dense, {}};
}

std::array<int, 4> Split(const std::array<int, 4>& sizes, int rank) {
  std::array<int, 4> index{};
  for (int d = 0; d < 4; ++d) {
    index[d] = rank % sizes[d];
    rank /= sizes[d];
  }
  return index;
}

}  // namespace

std::string CheckParallelSizes(const ParallelSizes& s, int world_size) {
  const std::array<std::pair<const char*, int>, 5> named = {{{"model.tensor_model_parallel_size", s.tensor},
                                                             {"model.context_parallel_size", s.context},
                                                             {"model.pipeline_model_parallel_size", s.pipeline},
                                                             {"model.expert_model_parallel_size", s.expert},
                                                             {"model.expert_tensor_parallel_size", s.expert_tensor}}};
  for (const auto& [key, value] : named) {
    if (value < 1) return fmt::format("{} = {}; at least 1", key, value);
  }
  if (s.data < 1 || s.world() != world_size) {
    return fmt::format("tensor {} x context {} x pipeline {} does not divide {} ranks; ask for a multiple of {} ranks", s.tensor,
                       s.context, s.pipeline, world_size, s.tensor * s.context * s.pipeline);
  }
  if (world_size % (s.expert_tensor * s.expert * s.pipeline) != 0) {
    return fmt::format("expert tensor {} x expert {} x pipeline {} does not divide {} ranks", s.expert_tensor, s.expert,
                       s.pipeline, world_size);
  }
  return "";
}

std::vector<std::vector<int>> ProcessGroups(const ParallelSizes& sizes, GroupKind kind) {
  const int world = sizes.world();
  const Grid grid = GridOf(sizes, kind);
  std::vector<std::vector<int>> groups;
  std::vector<int> group_of(static_cast<size_t>(world), -1);  // By the rank with all spanned coordinates 0.
  for (int rank = 0; rank < world; ++rank) {
    const std::array<int, 4> index = Split(grid.sizes, rank);
    int first = 0;
    for (int d = 3; d >= 0; --d) first = first * grid.sizes[d] + (grid.spans[d] ? 0 : index[d]);
    if (group_of[static_cast<size_t>(first)] < 0) {
      group_of[static_cast<size_t>(first)] = static_cast<int>(groups.size());
      groups.emplace_back();
    }
    groups[static_cast<size_t>(group_of[static_cast<size_t>(first)])].push_back(rank);
  }
  return groups;
}

std::vector<int> ProcessGroupOf(const ParallelSizes& sizes, GroupKind kind, int rank) {
  for (std::vector<int>& group : ProcessGroups(sizes, kind)) {
    if (std::find(group.begin(), group.end(), rank) != group.end()) return std::move(group);
  }
  return {};
}

RankCoordinates CoordinatesOf(const ParallelSizes& sizes, int rank) {
  const std::array<int, 4> dense = Split(GridOf(sizes, GroupKind::kTensor).sizes, rank);
  const std::array<int, 4> expert = Split(GridOf(sizes, GroupKind::kExpert).sizes, rank);
  return {dense[0], dense[1], dense[2], dense[3], expert[1], expert[0], expert[2]};
}

}  // namespace mbridge
