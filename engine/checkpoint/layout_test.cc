#include "engine/checkpoint/layout.h"

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

Part Block(const Shape& whole, int axis, int64_t begin, int64_t length) {
  Part part{whole, whole, axis, begin, 0, 0};
  if (axis >= 0) part.shard_shape[axis] = length;
  part.count = part.shard_shape.NumElements();
  return part;
}

Part Piece(Part block, int64_t begin, int64_t count) {
  block.flat_begin = begin;
  block.count = count;
  return block;
}

// The element numbers of the whole tensor that a part holds, by plain index arithmetic.
std::vector<int64_t> ElementsOf(const Part& part) {
  std::vector<int64_t> elements;
  for (int64_t local = part.flat_begin; local < part.flat_begin + part.count; ++local) {
    int64_t rest = local, global = 0, stride = 1;
    for (int axis = part.shard_shape.rank() - 1; axis >= 0; --axis) {
      const int64_t index = rest % part.shard_shape[axis] + (axis == part.shard_axis ? part.shard_begin : 0);
      rest /= part.shard_shape[axis];
      global += index * stride;
      stride *= part.global_shape[axis];
    }
    elements.push_back(global);
  }
  return elements;
}

const std::vector<Part>& Parts() {
  static const auto* parts = [] {
    auto* list = new std::vector<Part>;
    const Shape whole = {4, 6, 5};
    for (const Part& block : {Block(whole, -1, 0, 0), Block(whole, 0, 1, 2), Block(whole, 1, 0, 6), Block(whole, 1, 2, 3),
                              Block(whole, 2, 3, 2), Block(whole, 2, 0, 1)}) {
      list->push_back(block);
      list->push_back(Piece(block, 0, 1));
      list->push_back(Piece(block, block.count / 3, block.count / 2));
      list->push_back(Piece(block, block.count, 0));
    }
    return list;
  }();
  return *parts;
}

TEST(Layout, RunsNameEveryElementOnce) {
  for (const Part& part : Parts()) {
    ASSERT_EQ(CheckPart(part), "");
    std::vector<int64_t> from_runs;
    for (const auto& run : RunsOf(part)) {
      EXPECT_EQ(run.local, static_cast<int64_t>(from_runs.size()));
      for (int64_t i = 0; i < run.length; ++i) from_runs.push_back(run.global + i);
    }
    EXPECT_EQ(from_runs, ElementsOf(part));
  }
}

TEST(Layout, CopiesWhatTwoPartsShare) {
  for (const Part& source : Parts()) {
    const std::vector<int64_t> from = ElementsOf(source);
    for (const Part& target : Parts()) {
      const std::vector<int64_t> elements = ElementsOf(target);
      std::vector<int64_t> to(elements.size() + 1, -1);
      int64_t shared = 0;
      for (int64_t element : elements) shared += std::count(from.begin(), from.end(), element);
      EXPECT_EQ(CopyOverlap(source, from.data(), target, to.data(), sizeof(int64_t)), shared);
      EXPECT_EQ(Overlaps(source, target), shared > 0);
      for (size_t i = 0; i < elements.size(); ++i) {
        const bool present = std::find(from.begin(), from.end(), elements[i]) != from.end();
        ASSERT_EQ(to[i], present ? elements[i] : -1);
      }
      EXPECT_EQ(to.back(), -1);
    }
  }
}

TEST(Layout, CoverageNamesTheFirstFault) {
  const Shape whole = {4, 6};
  EXPECT_EQ(CheckCoverage({Block(whole, 1, 0, 2), Block(whole, 1, 2, 4)}), "");
  EXPECT_EQ(CheckCoverage({Piece(Block(whole, 0, 0, 2), 0, 5), Block(whole, 0, 2, 2), Piece(Block(whole, 0, 0, 2), 5, 7)}), "");
  EXPECT_EQ(CheckCoverage({Block(whole, 1, 0, 2)}), "no rank writes the elements 2 to 6");
  EXPECT_EQ(CheckCoverage({Block(whole, 0, 0, 3)}), "no rank writes the elements 18 to 24");
  EXPECT_EQ(CheckCoverage({Block(whole, -1, 0, 0), Block(whole, 0, 3, 1)}), "element 18 is written twice");
  EXPECT_THAT(CheckCoverage({Block(whole, 0, 0, 2), Block({4, 5}, 0, 2, 2)}), testing::HasSubstr("[4, 5]"));
}

TEST(Layout, PartsOutsideTheirTensorAreRefused) {
  const Shape whole = {4, 6};
  EXPECT_NE(CheckPart(Block(whole, 0, 3, 2)), "");
  EXPECT_NE(CheckPart(Block(whole, 0, -1, 2)), "");
  EXPECT_NE(CheckPart(Piece(Block(whole, 0, 0, 2), 10, 3)), "");
  EXPECT_NE(CheckPart(Piece(Block(whole, 0, 0, 2), -1, 3)), "");
  EXPECT_NE(CheckPart({whole, {4, 5}, 0, 0, 0, 20}), "");
  EXPECT_NE(CheckPart({whole, {4}, 0, 0, 0, 4}), "");
  EXPECT_NE(CheckPart({whole, whole, 2, 0, 0, 24}), "");
}

}  // namespace
}  // namespace mbridge
