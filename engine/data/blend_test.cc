#include "engine/data/blend.h"

#include <gmock/gmock.h>

#include "engine/data/test_support.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_data::Oracle;
using testing_data::Sha256Of;

TEST(BlendTest, NormalizationEqualsNumPy) {
  for (const auto& item : Oracle()["helpers"]["normalize"]) {
    const auto in = item["in"].get<std::vector<double>>();
    const auto once = NormalizeWeights(in);
    EXPECT_EQ(once, item["once"].get<std::vector<double>>());
    EXPECT_EQ(NormalizeWeights(once), item["twice"].get<std::vector<double>>());
  }
}

TEST(BlendTest, SamplesOfParts) {
  for (const auto& item : Oracle()["helpers"]["size_per_dataset"]) {
    const auto weights = NormalizeWeights(item["weights"].get<std::vector<double>>());
    for (size_t part = 0; part < weights.size(); ++part) {
      for (size_t split = 0; split < 3; ++split) {
        const int64_t size = item["sizes"][split];
        EXPECT_EQ(SamplesOfPart(weights[part], size, 0), item["target"][part][split]);
        EXPECT_EQ(SamplesOfPart(weights[part], size, item["surplus"]), item["buffer"][part][split]);
      }
    }
  }
}

TEST(BlendTest, BlendingIndices) {
  for (const auto& item : Oracle()["helpers"]["build_blending_indices"]) {
    const BlendIndex index = BuildBlendIndex(item["weights"].get<std::vector<double>>(), item["size"]);
    EXPECT_EQ(Sha256Of(index.dataset), item["dataset_index"]["sha256"]);
    EXPECT_EQ(Sha256Of(index.dataset_sample), item["dataset_sample_index"]["sha256"]);
  }
}

TEST(BlendTest, ExhaustiveIndices) {
  for (const auto& item : Oracle()["helpers"]["build_exhaustive_blending_indices"]) {
    const BlendIndex index = BuildExhaustiveBlendIndex(item["sizes"].get<std::vector<int64_t>>());
    EXPECT_EQ(Sha256Of(index.dataset), item["dataset_index"]["sha256"]);
    EXPECT_EQ(Sha256Of(index.dataset_sample), item["dataset_sample_index"]["sha256"]);
  }
}

TEST(BlendTest, Lists) {
  auto weighted = ParseBlendList("dataset.data_path", {"30", "a", "0.5e1", "b"});
  ASSERT_TRUE(weighted.ok());
  EXPECT_THAT(weighted->prefixes, ElementsAre("a", "b"));
  EXPECT_THAT(*weighted->weights, ElementsAre(30.0, 5.0));
  auto plain = ParseBlendList("dataset.data_path", {"a", "b"});
  ASSERT_TRUE(plain.ok());
  EXPECT_FALSE(plain->weights.has_value());
  auto odd = ParseBlendList("dataset.data_path", {"1", "2", "3"});
  ASSERT_TRUE(odd.ok());
  EXPECT_FALSE(odd->weights.has_value());
  for (const char* weight : {"0", "-1", "inf", "nan"}) {
    auto bad = ParseBlendList("dataset.data_path", {weight, "a", "1", "b"});
    ASSERT_FALSE(bad.ok()) << weight;
    EXPECT_EQ(ReasonOf(bad.status()), v1::REASON_INVALID_CONFIG);
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr("above 0"));
  }
  EXPECT_FALSE(ParseBlendList("dataset.data_path", {"a", ""}).ok());
}

}  // namespace
}  // namespace mbridge
