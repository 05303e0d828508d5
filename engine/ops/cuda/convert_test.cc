#include "engine/ops/convert.h"

#include "engine/ops/cuda/test_device.h"

namespace mbridge::test {
namespace {

TEST(ConvertCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const int64_t count : {1, 7, 4097}) {
    const Values values = RandomValues(count, 1, 1e3, DType::kF32);
    for (const DType from : kGpuTypes) {
      for (const DType to : kGpuTypes) {
        const Owned input(from, {count}, values), expected(to, {count});
        Convert.cpu({}, input, to, expected);
        const OnGpu output(to, {count});
        Convert(gpu, OnGpu(input), to, output);
        EXPECT_EQ(output.ToValues(), expected.ToValues()) << NameOf(from) << " to " << NameOf(to);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge::test
