#include "engine/data/split.h"

#include <gmock/gmock.h>

#include "engine/data/test_support.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using testing::HasSubstr;

TEST(SplitTest, MatricesAndRangesEqualMegatron) {
  for (const auto& item : testing_data::Oracle()["splits"]) {
    SCOPED_TRACE(item["split"].get<std::string>());
    auto matrix = ParseSplit(item["split"]);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    for (size_t i = 0; i < 3; ++i) {
      const auto& expected = item["matrix"][i];
      ASSERT_EQ((*matrix)[i].has_value(), !expected.is_null());
      if (expected.is_null()) continue;
      EXPECT_EQ((*matrix)[i]->first, expected[0].get<double>());
      EXPECT_EQ((*matrix)[i]->second, expected[1].get<double>());
      for (const auto& [count, ranges] : item["ranges"].items()) {
        const SequenceRange range = RangeOf(*(*matrix)[i], std::stoll(count));
        EXPECT_EQ(range.begin, ranges[i][0]) << count;
        EXPECT_EQ(range.end, ranges[i][1]) << count;
      }
    }
  }
}

TEST(SplitTest, SequencesNeededIsTheFewestThatWork) {
  auto matrix = ParseSplit("969, 30, 1");
  ASSERT_TRUE(matrix.ok());
  EXPECT_EQ(SequencesNeeded(*(*matrix)[0]), 1);
  const int64_t needed = SequencesNeeded(*(*matrix)[2]);
  EXPECT_EQ(needed, 501);  // mlm_numerics: the default split needs at least 501 for its test range.
  EXPECT_EQ(RangeOf(*(*matrix)[2], needed - 1).begin, RangeOf(*(*matrix)[2], needed - 1).end);
}

TEST(SplitTest, BadTextIsRefused) {
  for (const char* text : {"", "a", "1,,1", "1,2,3,4", "0,0,0", "-1,2,3", "nan,1,1", "1,1,1,", "1 1"}) {
    auto matrix = ParseSplit(text);
    ASSERT_FALSE(matrix.ok()) << text;
    EXPECT_EQ(FieldViolationsOf(matrix.status())[0].field, "dataset.split");
    EXPECT_THAT(std::string(matrix.status().message()), HasSubstr("969, 30, 1"));
  }
}

}  // namespace
}  // namespace mbridge
