#include "engine/ops/embedding_places.h"

#include "engine/ops/test_support.h"

namespace mbridge::test {
namespace {

TEST(EmbeddingPlaces, WordsOfOtherRanksAndRowsOfTheStream) {
  const Owned ids(DType::kI32, {2, 4}, {0, 7, 14, 21, 5, 12, 19, 3}), places(DType::kI32, {2, 4});
  LocalPlaces({}, ids, 5, 9, places);
  EXPECT_EQ(places.ToValues(), (Values{-1, 2, -1, -1, 0, 7, -1, -1}));
  const Owned rows(DType::kI32, {2, 2}), positions(DType::kI32, {2, 2});
  StreamPlaces({}, ids, 2, rows, positions);
  EXPECT_EQ(rows.ToValues(), (Values{0, 2, 1, 3}));
  EXPECT_EQ(positions.ToValues(), (Values{14, 21, 19, 3}));
}

}  // namespace
}  // namespace mbridge::test
