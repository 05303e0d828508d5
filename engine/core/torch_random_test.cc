// Vectors: PyTorch 2.11 on an H200 (reference runs of Megatron-LM) and PyTorch 1.13 on the CPU.
#include "engine/core/torch_random.h"

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/core/error.h"
#include "engine/core/philox.h"

namespace mbridge {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

TEST(PhiloxTest, PublishedWords) {
  EXPECT_THAT(PhiloxAt(3952, 0, 0), ElementsAre(0x3ecd0abeu, 0x6b72cb0du, 0xd8aa9151u, 0x1c2a4975u));
  EXPECT_THAT(PhiloxAt(3952, 1, 0), ElementsAre(0xc82ac3b0u, 0xd7f83271u, 0x16b68c17u, 0xbcb0e6fbu));
  EXPECT_THAT(PhiloxAt(3952, 0, 32), ElementsAre(0xaeb3c769u, 0x8a1ae4b2u, 0x9ea5efe6u, 0x255f7ad9u));
  EXPECT_THAT(PhiloxAt(1234, 0, 64), ElementsAre(0x54c46382u, 0x7cf80ab9u, 0x6e2a8b1eu, 0xc611f3a8u));
  EXPECT_THAT(PhiloxAt(3953, 0, 0), ElementsAre(0x0cb2194eu, 0x939f9753u, 0x8f04b90eu, 0x8b431627u));
}

// The known-answer test of the Random123 distribution.
TEST(PhiloxTest, KnownAnswer) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, 0), ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  EXPECT_THAT(Philox4x32({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, ~0ull),
              ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
}

TEST(PhiloxTest, BatchesEqualSingleBlocks) {
  for (uint64_t limit : {0ull, 1ull, 0x80000000ull, 0xe6666680ull, 0xffffffffull, 0x100000000ull}) {
    uint32_t packed[8];
    PhiloxBelowBySubsequence(0x123456789abcdefull, 0x500000007ull, 1000, limit, packed);
    for (uint32_t lane = 0; lane < 8; ++lane) {
      const PhiloxWords words = PhiloxAt(0x123456789abcdefull, 1000 + lane, 4 * 0x500000007ull);
      for (int i = 0; i < 4; ++i) EXPECT_EQ((packed[lane] >> (8 * i)) & 0xff, words[i] < limit ? 1u : 0u) << limit;
    }
  }
  for (uint32_t first : {0u, 8u, 123456u}) {
    uint8_t kept[8];
    PhiloxFoldedAtLeastByCounter(0xfedcba9876543210ull, first, 0x40000000u, kept);
    for (uint32_t lane = 0; lane < 8; ++lane) {
      const auto x = static_cast<int32_t>(Philox4x32({first + lane, 0, 0, 0}, 0xfedcba9876543210ull)[0]);
      EXPECT_EQ(kept[lane], (x < 0 ? -x - 1 : x) >= 0x40000000 ? 1 : 0);
    }
  }
}

TEST(CudaDrawTest, AdvanceOfTheReferenceRun) {
  EXPECT_EQ(CudaDrawAdvance(1024, 132), 4u);
  EXPECT_EQ(CudaDrawAdvance(524288, 132), 4u);
  EXPECT_EQ(CudaDrawAdvance(2097152, 132), 8u);
  EXPECT_EQ(CudaDrawAdvance(4194304, 132), 16u);
  EXPECT_EQ(CudaDrawAdvance(8192000, 132), 32u);
  EXPECT_EQ(CudaDrawAdvance(0, 132), 0u);
}

TEST(CudaNormalTest, WordEmbeddingOfTheReferenceRun) {
  std::vector<float> table(8192000);
  PhiloxStream stream{3952, 0};
  CudaNormal(&stream, kHopperSmCount, 0.0f, 0.02f, table);
  EXPECT_EQ(stream.offset, 32u);
  constexpr float kHead[] = {0.0162041169f, -0.0116707301f, 0.0324299000f, -0.0315159187f};
  // The vectors were made with an exact sine; the device's differs by up to 4e-7 of the deviation times the radius.
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(table[i], kHead[i], 1e-8f);
  constexpr float kSecondRow[] = {-0.0293528959f, 0.00778551260f, -0.0108333966f};
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(table[270336 + i], kSecondRow[i], 1e-8f);
}

TEST(CudaNormalTest, DependsOnTheSmCountAndContinuesTheStream) {
  std::vector<float> a(3 * 256 * 8 * 4 + 5), b(a.size()), c(a.size());
  PhiloxStream stream{7, 0}, other{7, 0};
  CudaNormal(&stream, 3, 0.0f, 1.0f, a);
  CudaNormal(&other, 4, 0.0f, 1.0f, b);
  EXPECT_NE(a, b);
  EXPECT_EQ(stream.offset, 8u);
  PhiloxStream later{7, 8};
  CudaNormal(&stream, 3, 0.0f, 1.0f, b);
  CudaNormal(&later, 3, 0.0f, 1.0f, c);
  EXPECT_EQ(b, c);
  double sum = 0, squares = 0;
  for (float x : a) sum += x, squares += x * x;
  EXPECT_NEAR(sum / a.size(), 0.0, 0.03);
  EXPECT_NEAR(squares / a.size(), 1.0, 0.03);
}

// Straight from the layout's description, one element at a time.
bool EagerKeeps(const PhiloxStream& stream, int64_t threads, float keep_probability, int64_t e, int64_t vec) {
  const int64_t q = e / vec, thread = q % threads, loop = q / threads, part = e % vec / 4;
  const uint32_t x = PhiloxAt(stream.seed, thread, stream.offset + 4 * ((vec / 4) * loop + part))[e % 4];
  return std::fma(static_cast<float>(x), 2.3283064e-10f, 2.3283064e-10f / 2) < keep_probability;
}

TEST(EagerDropoutTest, UniformsOfTheReferenceRun) {
  const auto uniform = [](uint32_t x) { return std::fma(static_cast<float>(x), 2.3283064e-10f, 2.3283064e-10f / 2); };
  constexpr float kThread0[] = {0.331121653f, 0.488159806f, 0.430336654f, 0.773711443f};
  constexpr float kThread1[] = {0.0951213464f, 0.425794452f, 0.836551905f, 0.878575087f};
  for (int i = 0; i < 4; ++i) {
    EXPECT_FLOAT_EQ(uniform(PhiloxAt(1234, 0, 64)[i]), kThread0[i]);
    EXPECT_FLOAT_EQ(uniform(PhiloxAt(1234, 1, 64)[i]), kThread1[i]);
  }
}

TEST(EagerDropoutTest, MaskFollowsTheKernelsLayout) {
  struct Case {
    int64_t count;
    int element_bytes;
    int64_t vec;
  };
  // Two devices' worth of loops with a ragged end; the grid has 256 * 8 * 2 threads.
  for (const Case& c : {Case{4096 * 8 * 2 + 40, 2, 8}, Case{4096 * 4 * 3 + 12, 4, 4}, Case{4096 * 4 * 2 + 4, 2, 4}}) {
    PhiloxStream stream{99, 12};
    const PhiloxStream before = stream;
    std::vector<uint8_t> keep(c.count, 7);
    EagerDropoutMask(&stream, 2, 0.1, c.element_bytes, keep);
    EXPECT_EQ(stream.offset, before.offset + CudaDrawAdvance(c.count, 2));
    int64_t wrong = 0, kept = 0;
    for (int64_t e = 0; e < c.count; ++e) {
      wrong += keep[e] != static_cast<uint8_t>(EagerKeeps(before, 4096, 0.9f, e, c.vec));
      kept += keep[e];
    }
    EXPECT_EQ(wrong, 0) << c.count;
    EXPECT_NEAR(static_cast<double>(kept) / c.count, 0.9, 0.01);
  }
}

TEST(EagerDropoutTest, OddSizesUseTheScalarLayout) {
  PhiloxStream stream{5, 8};
  std::vector<uint8_t> keep(2 * 4096 * 4 + 7);
  EagerDropoutMask(&stream, 2, 0.5, 2, keep);
  for (int64_t e : {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{4 * 4096 + 3}, static_cast<int64_t>(keep.size()) - 1}) {
    const int64_t row = e / 4096;
    const uint32_t x = PhiloxAt(5, e % 4096, 8 + 4 * (row / 4))[row % 4];
    EXPECT_EQ(keep[e], x < 0x80000000u ? 1 : 0) << e;
  }
  std::vector<uint8_t> pairs(10);
  EagerDropoutMask(&stream, 2, 0.5, 4, pairs);
  EXPECT_THAT(pairs, ::testing::Each(::testing::Le(1)));
}

TEST(EagerDropoutTest, RefusesImpossibleProbabilities) {
  PhiloxStream stream{1, 0};
  std::vector<uint8_t> keep(8);
  EXPECT_THROW(EagerDropoutMask(&stream, 132, 0.0, 2, keep), EngineError);
  EXPECT_THROW(CompiledDropoutMask(1, 1.0, keep), EngineError);
}

TEST(CompiledDropoutTest, SeedsOfTheReferenceRun) {
  PhiloxStream stream{1234, 68};
  EXPECT_EQ(DrawCompiledSeed(&stream), -1679947842082687456);
  EXPECT_EQ(DrawCompiledSeed(&stream), -383394605800854792);
  EXPECT_EQ(DrawCompiledSeed(&stream), 3517522525981523168);
  EXPECT_EQ(DrawCompiledSeed(&stream), 9124531481585685403);
  EXPECT_EQ(stream.offset, 84u);
}

TEST(CompiledDropoutTest, MaskOfTheReferenceRun) {
  constexpr int64_t kSeed = -1679947842082687456;
  constexpr double kUniforms[] = {0.37976244, 0.57184148, 0.79990256, 0.07219124, 0.80285370, 0.39121988, 0.66339195, 0.22257966};
  for (double p : {0.1, 0.3, 0.5, 0.8}) {
    std::vector<uint8_t> keep(8);
    CompiledDropoutMask(kSeed, p, keep);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(keep[i], kUniforms[i] > p ? 1 : 0) << p << " " << i;
  }
  std::vector<uint8_t> few(1003), all(2000);
  CompiledDropoutMask(kSeed, 0.1, few);
  CompiledDropoutMask(kSeed, 0.1, all);
  EXPECT_THAT(few, ElementsAreArray(all.data(), few.size()));
}

TEST(TorchCpuGeneratorTest, MersenneTwister) {
  TorchCpuGenerator generator(1234);
  EXPECT_EQ(generator.Next(), 822569775u);
  EXPECT_EQ(generator.Next(), 2137449171u);
  EXPECT_EQ(generator.Next(), 2671936806u);
  EXPECT_EQ(generator.Next(), 3512589365u);
  EXPECT_EQ(generator.drawn(), 4u);
}

TEST(TorchCpuGeneratorTest, PositionTableOfTheReferenceRun) {
  constexpr int64_t kCount = 512 * 256;
  TorchCpuGenerator generator(1234);
  generator.SkipNormal(kCount);
  std::vector<float> table(kCount);
  generator.Normal(0.0f, 0.02f, table);
  constexpr float kHead[] = {0.00572652f, -0.00761986f, -0.04429395f, -0.01307492f, -0.02403142f, -0.02675126f,
                             -0.0272345f, 0.02905973f,  -0.03115273f, 0.01761127f,  0.02163866f};
  for (int i = 0; i < 11; ++i) EXPECT_NEAR(table[i], kHead[i], 6e-9f);
  EXPECT_EQ(generator.drawn(), 2u * kCount);
}

// torch.manual_seed(1234); torch.empty(37).normal_(0.1, 0.02): the last sixteen are drawn anew.
TEST(TorchCpuGeneratorTest, TailIsRedrawn) {
  TorchCpuGenerator generator(1234);
  std::vector<float> values(37);
  generator.Normal(0.1f, 0.02f, values);
  EXPECT_NEAR(values[0], 0.09776563f, 1e-7f);
  EXPECT_NEAR(values[15], 0.07956285f, 1e-7f);
  EXPECT_NEAR(values[21], 0.09445545f, 1e-7f);
  EXPECT_NEAR(values[36], 0.08462016f, 1e-7f);
  EXPECT_EQ(generator.drawn(), 53u);
  std::vector<float> few(15);
  EXPECT_THROW(generator.Normal(0.0f, 1.0f, few), EngineError);
}

TEST(RngStreamsTest, SeedsAndWarmup) {
  RngStreams streams(1234);
  EXPECT_EQ(streams.model_parallel.seed, 3952u);
  streams.SkipJitWarmup(1024, 512, 4, 256, 512);
  EXPECT_EQ(streams.default_stream.offset, 64u);
  RngStreams tensor_parallel(1234, 0, 1);
  EXPECT_EQ(tensor_parallel.model_parallel.seed, 3953u);
  tensor_parallel.SkipJitWarmup(512, 512, 4, 256, 256);
  EXPECT_EQ(tensor_parallel.default_stream.offset, 60u);
  EXPECT_EQ(RngStreams(1234, 1).model_parallel.seed, 4052u);
}

TEST(RngStreamsTest, RestoredStreamsContinue) {
  RngStreams streams(42, 0, 0, 108);
  streams.cpu.Skip(1000);
  streams.default_stream.offset = 12;
  streams.model_parallel.offset = 400;
  RngStreams restored = RngStreams::Restore(streams.Save());
  EXPECT_EQ(restored.Save(), streams.Save());
  EXPECT_EQ(restored.cpu.Next(), streams.cpu.Next());
  EXPECT_EQ(restored.sm_count, 108);
}

}  // namespace
}  // namespace mbridge
