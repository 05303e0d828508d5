#include "engine/core/numpy_random.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

using testing::ElementsAre;

TEST(NumpySeedSequenceTest, SeedZeroGivesThePublishedWords) {
  EXPECT_THAT(NumpySeedSequence(0),
              ElementsAre(0xdb2cd7e7b0f478beull, 0xabf4641a2c71ba49ull, 0x20c6ed6d9d7b8d41ull, 0x2c4099de223c39d4ull));
}

TEST(NumpyGeneratorTest, FirstOutputsOfSeedZero) {
  NumpyGenerator generator(0);
  EXPECT_EQ(generator.Next64(), 0xa30febcfd9c2825full);
  EXPECT_EQ(generator.Next64(), 0x4510bdf882d9d721ull);
  EXPECT_EQ(generator.Next64(), 0x0a7d3da94ecde8b8ull);
  EXPECT_EQ(generator.Next64(), 0x043b27b61342f01dull);
}

TEST(NumpyGeneratorTest, Next32BuffersTheHighHalf) {
  NumpyGenerator generator(0);
  EXPECT_EQ(generator.Next32(), 0xd9c2825fu);
  EXPECT_EQ(generator.Next32(), 0xa30febcfu);
  EXPECT_EQ(generator.Next32(), 0x82d9d721u);
}

// numpy.random.default_rng(0).integers(1, 4096, size=100000, dtype=int32): Megatron-LM's mock document lengths.
TEST(NumpyGeneratorTest, MockDocumentLengths) {
  NumpyGenerator generator(0);
  std::vector<int32_t> lengths(100000);
  for (int32_t& length : lengths) length = generator.Integer(1, 4096);
  const std::vector<int32_t> first(lengths.begin(), lengths.begin() + 24);
  EXPECT_THAT(first, ElementsAre(3484, 2609, 2094, 1105, 1261, 168, 309, 68, 718, 3331, 2660, 3738, 2063, 2485, 3976, 2988, 2590,
                                 2227, 2293, 3830, 1136, 3341, 2748, 12));
  EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), 204637097);
}

TEST(NumpyGeneratorTest, IntegerBounds) {
  NumpyGenerator generator(7);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(generator.Integer(5, 6), 5);
  for (int i = 0; i < 1000; ++i) {
    const int32_t value = generator.Integer(-3, 2);
    EXPECT_GE(value, -3);
    EXPECT_LT(value, 2);
  }
}

// numpy.random.RandomState(1234).shuffle(arange(33333)): Megatron-LM's document order of the mock train split.
TEST(NumpyRandomStateTest, ShuffleOfSeed1234) {
  NumpyRandomState random(1234);
  std::vector<int32_t> values(33333);
  std::iota(values.begin(), values.end(), 0);
  random.Shuffle(std::span<int32_t>(values));
  const std::vector<int32_t> first(values.begin(), values.begin() + 8);
  EXPECT_THAT(first, ElementsAre(30903, 11571, 3134, 32473, 27454, 4409, 3622, 19425));
}

TEST(NumpyRandomStateTest, SmallShuffles) {
  NumpyRandomState random(1);
  std::vector<int> empty, one = {4};
  random.Shuffle(std::span<int>(empty));
  random.Shuffle(std::span<int>(one));
  EXPECT_EQ(one[0], 4);
  EXPECT_EQ(random.Next32(), 1791095845u);  // MT19937(1)'s first output: neither shuffle drew a number.
}

}  // namespace
}  // namespace mbridge
