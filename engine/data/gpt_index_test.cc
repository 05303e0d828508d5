#include "engine/data/gpt_index.h"

#include <gmock/gmock.h>

#include "engine/data/gpt_data.h"
#include "engine/data/test_support.h"

namespace mbridge {
namespace {

using testing_data::Oracle;
using testing_data::Sha256Of;

class LengthsOnly : public TokenSource {
 public:
  explicit LengthsOnly(std::vector<int32_t> lengths) : lengths_(std::move(lengths)) {
    SetLengths(lengths_.data(), static_cast<int64_t>(lengths_.size()));
  }
  void Read(int64_t, int64_t, int64_t, int32_t*) const override {}
  const std::string& name() const override { return name_; }

 private:
  std::vector<int32_t> lengths_;
  std::string name_ = "lengths";
};

TEST(GptIndexTest, SampleIndexEqualsMegatronsHelper) {
  for (const auto& item : Oracle()["helpers"]["build_sample_idx"]) {
    SCOPED_TRACE(item.value("note", std::string()));
    const LengthsOnly source(item["sizes"].get<std::vector<int32_t>>());
    const auto documents = item["document_index"].get<std::vector<int32_t>>();
    const int64_t epochs = item["num_epochs"], per_epoch = item["tokens_per_epoch"], length = item["sequence_length"];
    GptIndexOptions options{.sequences = {0, source.sequences()}, .sequence_length = length, .samples = kOneEpoch};
    options.extra_token = item["add_extra_token"];
    options.drop_last_partial = item["drop_last_partial_sequence"];
    // Asks for just so many samples that the plan has the recorded number of epochs.
    if (epochs > 1) options.samples = ((epochs - 1) * per_epoch) / length + 1;
    auto plan = PlanGptIndex("test", per_epoch, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ(plan->epochs, epochs);
    const auto index = BuildSampleIndex(source, documents, length, plan->samples, options.extra_token);
    EXPECT_EQ(static_cast<int64_t>(index.size()) / 2, item["sample_index"]["shape"][0]);
    EXPECT_EQ(Sha256Of(index), item["sample_index"]["sha256"]);
  }
}

TEST(GptIndexTest, PlanRefusesWhatCannotBeBuilt) {
  GptIndexOptions options{.sequences = {0, 4}, .sequence_length = 8, .samples = 10};
  EXPECT_FALSE(PlanGptIndex("empty", 0, options).ok());
  options.samples = int64_t{1} << 61;
  EXPECT_FALSE(PlanGptIndex("huge", 100, options).ok());
  options.samples = int64_t{1} << 33;
  const absl::Status many = PlanGptIndex("many epochs", 100, options).status();
  // (2^31 - 1) / 4 epochs of 100 tokens but for the last one's label, in samples of 8.
  constexpr int64_t kMost = (int64_t{INT32_MAX} / 4 * 100 - 1) / 8;
  EXPECT_THAT(std::string(many.message()), testing::HasSubstr(fmt::format("at most {} samples", kMost)));
}

TEST(GptIndexTest, InconsistentArraysAreFound) {
  const LengthsOnly source({5, 7, 3, 9, 11});
  const GptIndexOptions options{.sequences = {0, 5}, .sequence_length = 4, .samples = 12};
  auto plan = PlanGptIndex("test", 35, options);
  ASSERT_TRUE(plan.ok());
  const GptIndex good = BuildGptIndex(source, options, *plan);
  EXPECT_TRUE(IsConsistent(good, source, options, *plan));
  const auto damaged = [&](auto GptIndex::*member, size_t at, auto value) {
    GptIndex index = good;
    auto& array = index.*member;
    using T = std::remove_const_t<typename decltype(array.values)::element_type>;
    std::vector<T> copy(array.values.begin(), array.values.end());
    copy[at] = static_cast<T>(value);
    array = SharedArray<T>::Own(std::move(copy));
    return IsConsistent(index, source, options, *plan);
  };
  EXPECT_FALSE(damaged(&GptIndex::document, 0, 5));
  EXPECT_FALSE(damaged(&GptIndex::document, 1, -1));
  EXPECT_FALSE(damaged(&GptIndex::sample, 2, 1000));
  EXPECT_FALSE(damaged(&GptIndex::sample, 3, -1));
  EXPECT_FALSE(damaged(&GptIndex::shuffle, 0, plan->samples));
}

}  // namespace
}  // namespace mbridge
