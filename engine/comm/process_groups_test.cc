#include "engine/comm/process_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

using Groups = std::vector<std::vector<int>>;

// The example of Megatron-LM's parallel_state documentation: 16 ranks, TP 2, PP 4.
TEST(ProcessGroups, TensorPipelineDataOfSixteenRanks) {
  const ParallelSizes sizes{.tensor = 2, .data = 2, .pipeline = 4, .expert_tensor = 2};
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kTensor),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kData),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kPipeline), (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kTensorPipeline), (Groups{{0, 1, 4, 5, 8, 9, 12, 13}, {2, 3, 6, 7, 10, 11, 14, 15}}));
}

TEST(ProcessGroups, ContextVariesFasterThanData) {
  const ParallelSizes sizes{.tensor = 2, .context = 2, .data = 2, .expert_tensor = 2};
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kContext), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kData), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kDataContext), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kTensorContext), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(ProcessGroups, ExpertsRegroupTheDenseDimensions) {
  const ParallelSizes sizes{.tensor = 2, .data = 4, .expert = 4, .expert_tensor = 1};
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kExpert), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(ProcessGroups(sizes, GroupKind::kExpertData), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(CoordinatesOf(sizes, 6), (RankCoordinates{.tensor = 0, .data = 3, .expert = 2, .expert_data = 1}));
  EXPECT_EQ(ProcessGroupOf(sizes, GroupKind::kData, 5), (std::vector<int>{1, 3, 5, 7}));
}

TEST(ProcessGroups, EveryKindHoldsEveryRankOnce) {
  const ParallelSizes sizes{.tensor = 2, .context = 2, .data = 2, .pipeline = 2, .expert = 2, .expert_tensor = 2};
  for (int kind = 0; kind <= static_cast<int>(GroupKind::kExpertTensorExpertPipeline); ++kind) {
    std::vector<int> seen;
    for (const std::vector<int>& group : ProcessGroups(sizes, static_cast<GroupKind>(kind))) {
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      seen.insert(seen.end(), group.begin(), group.end());
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_THAT(seen, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) << kind;
  }
}

TEST(ProcessGroups, SizesThatDoNotFitAreNamed) {
  EXPECT_EQ(CheckParallelSizes({.tensor = 2, .data = 2, .expert_tensor = 2}, 4), "");
  EXPECT_THAT(CheckParallelSizes({.tensor = 0}, 4), testing::HasSubstr("model.tensor_model_parallel_size = 0"));
  EXPECT_THAT(CheckParallelSizes({.tensor = 3, .data = 1, .expert_tensor = 3}, 4), testing::HasSubstr("multiple of 3"));
  EXPECT_THAT(CheckParallelSizes({.data = 4, .expert = 3}, 4), testing::HasSubstr("expert 3"));
}

}  // namespace
}  // namespace mbridge
