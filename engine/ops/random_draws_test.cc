#include <algorithm>
#include <limits>
#include <span>

#include "engine/core/philox.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/normal_init.h"
#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::Values;

constexpr int64_t kCount = 3000;

TEST(RandomDraws, MasksAreTheStreams) {
  std::vector<uint8_t> eager(kCount), compiled(kCount);
  PhiloxStream stream{1234, 64};
  EagerDropoutMask(&stream, 2, 0.1, 2, eager);
  CompiledDropoutMask(-5, 0.1, compiled);
  const Owned keep(DType::kU8, {kCount});
  DrawEagerDropoutMask({}, PhiloxStream{1234, 64}, 2, 0.1, 2, keep);
  EXPECT_EQ(keep.ToValues(), Values(eager.begin(), eager.end()));
  DrawCompiledDropoutMask({}, -5, 0.1, keep);
  EXPECT_EQ(keep.ToValues(), Values(compiled.begin(), compiled.end()));
}

// One element after the other: the seed is the position's first two words modulo 2^64 - 1, from -2^63 on; element i is kept where
// the first word at counter i, folded to [0, 2^31), is above that share of the numbers.
Values CompiledReference(const PhiloxStream& position, double p, int64_t count) {
  const PhiloxWords drawn = PhiloxAt(position.seed, 0, position.offset);
  const uint64_t seed = ((uint64_t{drawn[0]} << 32) + drawn[1]) % std::numeric_limits<uint64_t>::max() + (uint64_t{1} << 63);
  Values keep(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = Philox4x32({static_cast<uint32_t>(i), 0, 0, 0}, seed)[0];
    keep[i] = (word >> 31 != 0 ? ~word : word) * 0x1p-31 > p ? 1 : 0;
  }
  return keep;
}

// A mask of `count` elements from byte `begin` on of a larger one, whose other bytes stay.
void CheckCompiledAt(const MaskPosition& position, const PhiloxStream& stream, double p, int64_t begin, int64_t count) {
  SCOPED_TRACE(testing::Message() << count << " from " << begin << " on, p = " << p);
  const Owned buffer(DType::kU8, {count + 24}, Values(count + 24, 7.0));
  DrawCompiledDropoutMaskAt({}, position, p, buffer.tensor().Rows(begin, count));
  Values expected(count + 24, 7.0);
  const Values mask = CompiledReference(stream, p, count);
  std::copy(mask.begin(), mask.end(), expected.begin() + begin);
  EXPECT_EQ(buffer.ToValues(), expected);
}

TEST(RandomDraws, CompiledMasksAtAPosition) {
  for (const PhiloxStream& position : {PhiloxStream{1234, 68}, {1234, 72}, {0xfedcba9876543210, 4 * (uint64_t{1} << 33)}}) {
    for (const double p : {0.1, 0.5, 0.999}) {
      for (const int64_t count : {0, 1, 3, 4, 7, 257, 1000, 1003}) CheckCompiledAt(position, position, p, 0, count);
      for (const int64_t begin : {1, 2, 3, 4, 9}) CheckCompiledAt(position, position, p, begin, 130 + begin);
    }
  }
}

TEST(RandomDraws, CompiledMasksAtAPositionInMemory) {
  uint64_t words[] = {1234, 68};  // Copied to a device and back.
  const MaskPosition position(words, 36);
  if (test::g_on_device) {
    for (const int64_t count : {0, 1, 254, 1003}) CheckCompiledAt(position, {1234, 68 + 36}, 0.1, 0, count);
  } else {
    const Owned keep(DType::kU8, {8});
    EXPECT_THROW(DrawCompiledDropoutMaskAt({}, position, 0.1, keep), EngineError);
  }
}

TEST(RandomDraws, RefuseImpossibleProbabilities) {
  const Owned keep(DType::kU8, {8});
  for (const double p : {0.0, 1.0, -0.1, static_cast<double>(NAN)}) {
    EXPECT_THROW(DrawCompiledDropoutMaskAt({}, PhiloxStream{1, 0}, p, keep), EngineError) << p;
  }
}

TEST(RandomDraws, NormalsAreRoundedOnce) {
  std::vector<float> drawn(kCount);
  PhiloxStream stream{99, 4};
  CudaNormal(&stream, kHopperSmCount, 0.0f, 0.02f, drawn);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Owned out(dtype, {kCount});
    DrawNormal({}, PhiloxStream{99, 4}, kHopperSmCount, 0.0f, 0.02f, out);
    Values expected(drawn.begin(), drawn.end());
    for (double& x : expected) x = test::RoundTo(dtype, x);
    if (test::g_on_device) {  // The sine is the device's own there, and here an emulation of it.
      test::ExpectNear(out.ToValues(), expected,
                       dtype == DType::kBF16  ? 1.0 / 128
                       : dtype == DType::kF16 ? 1.0 / 1024
                                              : 4e-6,
                       1e-8);
    } else {
      EXPECT_EQ(out.ToValues(), expected);
    }
  }
}

}  // namespace
}  // namespace mbridge
