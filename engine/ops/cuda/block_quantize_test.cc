#include "engine/ops/block_quantize.h"

#include "engine/ops/cuda/test_device.h"

namespace mbridge::test {
namespace {

TEST(BlockQuantizeCuda, SmallCopiesEqualTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kRows = 144, kCols = 208;  // The last blocks end early.
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    const Owned x(dtype, {kRows, kCols}, SpreadValues(kRows * kCols, 1, 8)), amax(DType::kF32, {1}, {256});
    const OnGpu x_gpu(x), amax_gpu(amax);
    for (const BlockFormat format : {BlockFormat::kFp8, BlockFormat::kMxfp8, BlockFormat::kNvfp4}) {
      for (int flags = 0; flags < 8; ++flags) {
        BlockQuantizeOptions options{.format = format, .square = (flags & 1) != 0, .down_rows = (flags & 2) != 0};
        options.element = format == BlockFormat::kNvfp4 ? kE2M1Float : (flags & 4) != 0 ? kE5M2Float : kE4M3Float;
        options.stochastic = format == BlockFormat::kNvfp4 && (flags & 4) != 0;
        options.seed = 77;
        const Owned y(dtype, {kRows, kCols});
        const OnGpu y_gpu(dtype, {kRows, kCols});
        BlockQuantize.cpu({}, x, options, amax, y);
        BlockQuantize(gpu, x_gpu, options, amax_gpu, y_gpu);
        EXPECT_EQ(y_gpu.ToValues(), y.ToValues()) << static_cast<int>(format) << ' ' << flags << ' ' << NameOf(dtype);
      }
    }
    const Owned rotated(dtype, {kRows, kCols});
    const OnGpu rotated_gpu(dtype, {kRows, kCols});
    HadamardDownRows.cpu({}, x, rotated);
    HadamardDownRows(gpu, x_gpu, rotated_gpu);
    EXPECT_EQ(rotated_gpu.ToValues(), rotated.ToValues());
  }
}

}  // namespace
}  // namespace mbridge::test
