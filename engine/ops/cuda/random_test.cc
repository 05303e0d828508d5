#include "engine/ops/cuda/twin_test.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/normal_init.h"

namespace mbridge::test {
namespace {

// Every vector size of the eager kernel, and more elements than the draw's threads take in one turn.
TEST(DropoutMaskCuda, EagerEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const int sm_count : {2, kHopperSmCount}) {
    for (const int element_bytes : {2, 4}) {
      for (const int64_t count : {1, 3, 254, 1000, 4 * 1023, 100008, 100001, 100002, 100004, 2400000}) {
        const PhiloxStream position{1234, 4 * 17};
        const Owned expected(DType::kU8, {count});
        const OnGpu actual(DType::kU8, {count});
        DrawEagerDropoutMask.cpu({}, position, sm_count, 0.1, element_bytes, expected);
        DrawEagerDropoutMask(gpu, position, sm_count, 0.1, element_bytes, actual);
        EXPECT_EQ(actual.ToValues(), expected.ToValues()) << sm_count << " " << element_bytes << " " << count;
      }
    }
  }
}

TEST(DropoutMaskCuda, CompiledEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const int64_t count : {1, 3, 257, 100003}) {
    for (const double p : {0.1, 0.5}) {
      const Owned expected(DType::kU8, {count});
      const OnGpu actual(DType::kU8, {count});
      DrawCompiledDropoutMask.cpu({}, -1679947842082687456, p, expected);
      DrawCompiledDropoutMask(gpu, -1679947842082687456, p, actual);
      EXPECT_EQ(actual.ToValues(), expected.ToValues()) << count;
    }
  }
}

// What a CUDA graph replays: the position is read from device memory by the kernel.
TEST(DropoutMaskCuda, PositionsInDeviceMemory) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr uint64_t kSeed = 1234, kBegin = 4 * 17, kAhead = 4 * 9;
  const OnGpu memory(DType::kI64, {2});
  const uint64_t words[2] = {kSeed, kBegin};
  MB_CUDA(cudaMemcpy(memory.tensor().data, words, sizeof(words), cudaMemcpyHostToDevice));
  MB_CUDA(cudaDeviceSynchronize());
  const MaskPosition on_device(static_cast<const uint64_t*>(memory.tensor().data), kAhead);
  const PhiloxStream position{kSeed, kBegin + kAhead};
  for (const int64_t count : {3, 254, 1001, 100008, 100002, 100004}) {
    const Owned expected(DType::kU8, {count});
    const OnGpu actual(DType::kU8, {count}), plain(DType::kU8, {count});
    DrawEagerDropoutMask.cpu({}, position, kHopperSmCount, 0.1, 2, expected);
    DrawEagerDropoutMask(gpu, on_device, kHopperSmCount, 0.1, 2, actual);
    EXPECT_EQ(actual.ToValues(), expected.ToValues()) << count;
    DrawCompiledDropoutMaskAt.cpu({}, position, 0.1, expected);
    DrawCompiledDropoutMaskAt(gpu, on_device, 0.1, actual);
    DrawCompiledDropoutMaskAt(gpu, position, 0.1, plain);
    EXPECT_EQ(actual.ToValues(), expected.ToValues()) << count;
    EXPECT_EQ(plain.ToValues(), expected.ToValues()) << count;
  }
}

TEST(DrawNormalCuda, GivesMegatronsEmbedding) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kCount = 32000 * 256;
  const OnGpu drawn(DType::kF32, {kCount});
  DrawNormal(gpu, PhiloxStream{3952, 0}, kHopperSmCount, 0.0f, 0.02f, drawn);
  const Values values = drawn.ToValues();
  const Values begin(values.begin(), values.begin() + 4), later(values.begin() + 270336, values.begin() + 270339);
  // The references are an emulation's, whose sine and cosine are not the GPU's. CudaInitialWeights compares real weights by hash.
  ExpectNear(begin, {0.0162041169, -0.0116707301, 0.0324299000, -0.0315159187}, 1e-6, 0);
  ExpectNear(later, {-0.0293528959, 0.00778551260, -0.0108333966}, 1e-6, 0);
}

TEST(DrawNormalCuda, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t count : {1, 1000, 300001, 1200000}) {
      const Owned expected(dtype, {count});
      const OnGpu actual(dtype, {count});
      DrawNormal.cpu({}, PhiloxStream{99, 8}, kHopperSmCount, 0.0f, 0.02f, expected);
      DrawNormal(gpu, PhiloxStream{99, 8}, kHopperSmCount, 0.0f, 0.02f, actual);
      ExpectWithinAStep(actual.ToValues(), expected.ToValues(), dtype, 1e-9, 1e-4);
    }
  }
}

TEST(RandomCudaSmall, MasksAndNumbersEqualTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const int64_t count : {1, 3, 254, 1000, 4092}) {
    const Owned mask(DType::kU8, {count}), numbers(DType::kBF16, {count});
    const OnGpu gpu_mask(DType::kU8, {count}), gpu_numbers(DType::kBF16, {count});
    DrawEagerDropoutMask.cpu({}, PhiloxStream{1234, 4}, 2, 0.1, 2, mask);
    DrawEagerDropoutMask(gpu, PhiloxStream{1234, 4}, 2, 0.1, 2, gpu_mask);
    EXPECT_EQ(gpu_mask.ToValues(), mask.ToValues()) << count;
    DrawCompiledDropoutMask.cpu({}, 77, 0.1, mask);
    DrawCompiledDropoutMask(gpu, 77, 0.1, gpu_mask);
    EXPECT_EQ(gpu_mask.ToValues(), mask.ToValues()) << count;
    DrawNormal.cpu({}, PhiloxStream{99, 8}, kHopperSmCount, 0.0f, 0.02f, numbers);
    DrawNormal(gpu, PhiloxStream{99, 8}, kHopperSmCount, 0.0f, 0.02f, gpu_numbers);
    ExpectWithinAStep(gpu_numbers.ToValues(), numbers.ToValues(), DType::kBF16, 1e-9, 1e-2);
  }
}

}  // namespace
}  // namespace mbridge::test
