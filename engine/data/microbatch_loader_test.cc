#include "engine/data/microbatch_loader.h"

#include <gmock/gmock.h>

#include "engine/core/error.h"

namespace mbridge {
namespace {

using testing::ElementsAre;

// Sample i is filled with i.
class CountingDataset : public Dataset {
 public:
  explicit CountingDataset(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  int64_t sequence_length() const override { return 2; }
  void Get(int64_t index, const SampleView& sample) const override {
    for (int i = 0; i < 2; ++i) {
      sample.tokens[i] = sample.labels[i] = static_cast<int32_t>(index);
      sample.position_ids[i] = i;
      sample.loss_mask[i] = 1;
    }
  }

 private:
  int64_t size_;
};

std::vector<int32_t> RowsOf(const Batch& batch) {
  std::vector<int32_t> rows;
  for (int row = 0; row < batch.micro_batch_size; ++row) rows.push_back(batch.tokens[2 * row]);
  return rows;
}

TEST(MicrobatchLoaderTest, RanksTakeTheirSliceAndTheLastGroupIsDropped) {
  const CountingDataset data(13);
  for (int rank = 0; rank < 2; ++rank) {
    MicrobatchLoader loader(&data, 0, 3, rank, 2);
    EXPECT_EQ(loader.remaining(), 2);
    Batch batch(3, 2);
    ASSERT_TRUE(loader.Next(&batch));
    EXPECT_THAT(RowsOf(batch), ElementsAre(3 * rank, 3 * rank + 1, 3 * rank + 2));
    EXPECT_EQ(loader.consumed(), 6);
    ASSERT_TRUE(loader.Next(&batch));
    EXPECT_THAT(RowsOf(batch), ElementsAre(6 + 3 * rank, 7 + 3 * rank, 8 + 3 * rank));
    EXPECT_FALSE(loader.Next(&batch));
    EXPECT_EQ(loader.consumed(), 12);
  }
}

TEST(MicrobatchLoaderTest, ResumesAtAnySampleCount) {
  const CountingDataset data(100);
  MicrobatchLoader straight(&data, 0, 2, 1, 2);
  Batch expected(2, 2), batch(2, 2);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(straight.Next(&expected));
  MicrobatchLoader resumed(&data, 16, 2, 1, 2);
  ASSERT_TRUE(resumed.Next(&batch));
  EXPECT_EQ(batch.tokens, expected.tokens);
  EXPECT_EQ(resumed.consumed(), straight.consumed());
  // With another data-parallel size the same samples follow.
  MicrobatchLoader wider(&data, 16, 1, 2, 4);
  Batch one(1, 2);
  ASSERT_TRUE(wider.Next(&one));
  EXPECT_THAT(RowsOf(one), ElementsAre(18));
}

TEST(MicrobatchLoaderTest, RefusesCountsBeyondTheData) {
  const CountingDataset data(10);
  EXPECT_THROW(MicrobatchLoader(&data, 11, 1, 0, 1), EngineError);
  EXPECT_THROW(MicrobatchLoader(&data, -1, 1, 0, 1), EngineError);
  EXPECT_THROW(MicrobatchLoader(&data, 0, 1, 2, 2), EngineError);
  MicrobatchLoader loader(&data, 10, 1, 0, 1);
  Batch batch(1, 2), wrong(2, 2);
  EXPECT_FALSE(loader.Next(&batch));
  EXPECT_THROW(loader.Next(&wrong), EngineError);
}

}  // namespace
}  // namespace mbridge
