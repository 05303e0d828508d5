#include "engine/model/layer_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

namespace mbridge {
namespace {

using testing::ElementsAre;
using Group = std::tuple<int64_t, int64_t, bool>;  // First layer, the one after the last, recomputed.

std::vector<Group> Groups(const GptConfig& c) {
  std::vector<Group> groups;
  for (const LayerGroup& group : GroupsOf(c)) groups.emplace_back(group.begin, group.end, group.again);
  return groups;
}

TEST(LayerGroups, FollowTheRecomputeMethod) {
  GptConfig c;
  c.num_layers = 5;
  EXPECT_THAT(Groups(c), ElementsAre(Group(0, 5, false)));
  c.recompute = Recompute::kUniform;
  c.recompute_num_layers = 2;
  EXPECT_THAT(Groups(c), ElementsAre(Group(0, 2, true), Group(2, 4, true), Group(4, 5, true)));
  c.recompute = Recompute::kBlock;
  EXPECT_THAT(Groups(c), ElementsAre(Group(0, 1, true), Group(1, 2, true), Group(2, 5, false)));
  c.recompute_num_layers = 9;  // More than there are.
  EXPECT_EQ(Groups(c).size(), 5u);
}

}  // namespace
}  // namespace mbridge
