#include <span>

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
