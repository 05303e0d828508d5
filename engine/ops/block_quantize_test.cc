#include "engine/ops/block_quantize.h"

#include "engine/ops/fp8.h"
#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::RandomValues;
using test::Values;

TEST(NarrowFloatTest, RoundsAsTheCodesDo) {
  for (const auto& [narrow, format] : {std::pair{kE4M3Float, Fp8Format::kE4M3}, {kE5M2Float, Fp8Format::kE5M2}}) {
    for (const double scale : {1e-6, 1e-3, 1.0, 100.0}) {
      for (const double value : test::SpreadValues(500, 7, 8)) {
        const auto x = static_cast<float>(value * scale);
        EXPECT_EQ(RoundTo(x, narrow), FromFp8(ToFp8(x, format), format)) << x;
      }
    }
  }
  const float e2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (const float value : e2m1) EXPECT_EQ(RoundTo(-value, kE2M1Float), -value);
  EXPECT_EQ(RoundTo(0.25f, kE2M1Float), 0.0f);  // Ties to even: the second, the fourth, ... of the list.
  EXPECT_EQ(RoundTo(0.75f, kE2M1Float), 1.0f);
  EXPECT_EQ(RoundTo(2.5f, kE2M1Float), 2.0f);
  EXPECT_EQ(RoundTo(5.0f, kE2M1Float), 4.0f);
  EXPECT_EQ(RoundTo(5.1f, kE2M1Float), 6.0f);
  EXPECT_EQ(RoundTo(1e9f, kE2M1Float), 6.0f);
}

TEST(NarrowFloatTest, StochasticRoundingKeepsTheMean) {
  for (const float x : {0.3f, 1.2f, -2.3f, 5.9f}) {
    double sum = 0;
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) {
      const float rounded = RoundStochastically(x, kE2M1Float, UniformAt(5, i));
      EXPECT_LE(std::fabs(rounded - x), 2.0f);
      sum += rounded;
    }
    EXPECT_NEAR(sum / kDraws, x, 0.03);  // Deviation at most 1 / sqrt(draws) = 0.007.
  }
}

TEST(BlockQuantizeTest, BlocksHaveTheirOwnScales) {
  // Eight orders of magnitude between blocks: one scale for all would leave nothing of the second.
  for (const BlockFormat format : {BlockFormat::kFp8, BlockFormat::kMxfp8, BlockFormat::kNvfp4}) {
    const int64_t length = BlockLength(format);
    Values values = RandomValues(2 * length, 3);
    for (int64_t i = 0; i < length; ++i) values[length + i] *= format == BlockFormat::kNvfp4 ? 1e-2 : 1e-8;
    const Owned x(DType::kF32, {1, 2 * length}, values), y(DType::kF32, {1, 2 * length});
    double largest = 0;
    for (const double value : values) largest = std::max(largest, std::fabs(value));
    const Owned amax(DType::kF32, {1}, {largest});
    const NarrowFloat element = format == BlockFormat::kNvfp4 ? kE2M1Float : kE4M3Float;
    BlockQuantize({}, x, {.format = format, .element = element}, amax, y);
    for (const int64_t begin : {int64_t{0}, length}) {
      double of_block = 0;
      for (int64_t i = 0; i < length; ++i) of_block = std::max(of_block, std::fabs(x[begin + i]));
      for (int64_t i = 0; i < length; ++i) {
        // Half a step of the element, relative, or half the smallest step; NVFP4's scale has a rounding of its own.
        const double relative = format == BlockFormat::kNvfp4 ? 0.25 + 1.0 / 16 : 1.0 / 16;
        const double smallest = format == BlockFormat::kNvfp4 ? of_block / 12 : of_block / 448 / 512 * 2;
        EXPECT_NEAR(y[begin + i], x[begin + i], std::fabs(x[begin + i]) * relative + smallest) << static_cast<int>(format);
      }
    }
  }
}

TEST(BlockQuantizeTest, ScalesOfMicroscalingArePowersOfTwo) {
  // 448 fits the scale 1, 449 does not and takes 2.
  Values values(64, 1.0625);  // 17/16: a tie of E4M3 with scale 1, which goes to even.
  values[0] = 448, values[32] = 449;
  const Owned x(DType::kF32, {1, 64}, values), y(DType::kF32, {1, 64});
  BlockQuantize({}, x, {.format = BlockFormat::kMxfp8}, {}, y);
  EXPECT_EQ(y[0], 448);
  EXPECT_EQ(y[1], 1.0);
  EXPECT_EQ(y[32], 448);  // 224.5 rounds to 224, times 2.
  BlockQuantize({}, x, {.format = BlockFormat::kMxfp8, .element = kE5M2Float}, {}, y);
  EXPECT_EQ(y[0], 448);
}

TEST(BlockQuantizeTest, DownRowsIsTheTransposedCase) {
  constexpr int64_t kRows = 40, kCols = 24;  // Also blocks that end early.
  for (const BlockFormat format : {BlockFormat::kFp8, BlockFormat::kMxfp8, BlockFormat::kNvfp4}) {
    const Values values = test::SpreadValues(kRows * kCols, 11, 8);
    Values transposed(kRows * kCols);
    for (int64_t i = 0; i < kRows * kCols; ++i) transposed[i % kCols * kRows + i / kCols] = values[i];
    const Owned x(DType::kF32, {kRows, kCols}, values), xt(DType::kF32, {kCols, kRows}, transposed),
        amax(DType::kF32, {1}, {256});
    const Owned y(DType::kF32, {kRows, kCols}), yt(DType::kF32, {kCols, kRows});
    BlockQuantize({}, x, {.format = format, .down_rows = true}, amax, y);
    BlockQuantize({}, xt, {.format = format}, amax, yt);
    for (int64_t i = 0; i < kRows * kCols; ++i) EXPECT_EQ(y[i], yt[i % kCols * kRows + i / kCols]);
    BlockQuantize({}, x, {.format = format, .square = true}, amax, y);
    BlockQuantize({}, xt, {.format = format, .square = true}, amax, yt);
    for (int64_t i = 0; i < kRows * kCols; ++i) EXPECT_EQ(y[i], yt[i % kCols * kRows + i / kCols]);
  }
}

TEST(BlockQuantizeTest, RotatedOperandsHaveTheSameProduct) {
  constexpr int64_t kRows = 32, kA = 3, kB = 5;
  const Owned a(DType::kF32, {kRows, kA}, RandomValues(kRows * kA, 1)), b(DType::kF32, {kRows, kB}, RandomValues(kRows * kB, 2));
  const Owned ra(DType::kF32, {kRows, kA}), rb(DType::kF32, {kRows, kB});
  HadamardDownRows({}, a, ra);
  HadamardDownRows({}, b, rb);
  for (int64_t i = 0; i < kA; ++i) {
    for (int64_t j = 0; j < kB; ++j) {
      double before = 0, after = 0;
      for (int64_t row = 0; row < kRows; ++row) {
        before += a[row * kA + i] * b[row * kB + j];
        after += ra[row * kA + i] * rb[row * kB + j];
      }
      EXPECT_NEAR(after, before, 1e-5);
    }
  }
  EXPECT_NE(ra[0], a[0]);
  const Owned odd(DType::kF32, {20, 3});
  EXPECT_THROW(HadamardDownRows({}, odd, odd), EngineError);
}

TEST(BlockQuantizeTest, ZerosAndRefusals) {
  const Owned x(DType::kBF16, {2, 32}), y(DType::kBF16, {2, 32}, Values(64, 1.0)), amax(DType::kF32, {1});
  for (const BlockFormat format : {BlockFormat::kFp8, BlockFormat::kMxfp8, BlockFormat::kNvfp4}) {
    BlockQuantize({}, x, {.format = format}, amax, y);
    EXPECT_EQ(y.ToValues(), Values(64, 0.0));
  }
  EXPECT_THROW(BlockQuantize({}, x, {.format = BlockFormat::kNvfp4}, {}, y), EngineError);
}

}  // namespace
}  // namespace mbridge
