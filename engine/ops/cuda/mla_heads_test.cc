#include "engine/ops/mla_heads.h"

#include "engine/ops/cuda/twin_test.h"

namespace mbridge::test {
namespace {

struct Problem {
  int64_t s, b;
  MlaLayout layout;
  int64_t rank, half;  // Of the latent vector; pairs that are turned.
};

void ExpectTwinsAgree(const Gpu& gpu, const Problem& problem, RotaryPairs pairs, DType dtype) {
  const auto& [s, b, o, rank, half] = problem;
  SCOPED_TRACE(fmt::format("{} s {} b {} heads {} pairs {}", NameOf(dtype), s, b, o.heads, static_cast<int>(pairs)));
  const int64_t down_width = rank + o.turned_size, width = o.qkv().width();
  const Twin query(dtype, {s, b, o.query_width()}, 1), key_value(dtype, {s, b, o.key_value_width()}, 2),
      down(dtype, {s, b, down_width}, 3);
  const Twin cosine(DType::kF32, {s, half}, RandomValues(s * half, 4, 1.0, dtype)),
      sine(DType::kF32, {s, half}, RandomValues(s * half, 5, 1.0, dtype));
  const Owned qkv(DType::kF32, {s, b, width});
  const OnGpu gpu_qkv(dtype, {s, b, width});
  MlaJoinHeads.cpu({}, query.cpu, key_value.cpu, down.cpu, cosine.cpu, sine.cpu, o, pairs, dtype, qkv);
  MlaJoinHeads(gpu, query.gpu, key_value.gpu, down.gpu, cosine.gpu, sine.gpu, o, pairs, dtype, gpu_qkv);
  EXPECT_EQ(gpu_qkv.ToValues(), qkv.ToValues());

  const Twin d_qkv(dtype, {s, b, width}, 6), d_down(dtype, {s, b, down_width}, 7);  // The latent part of d_down stays.
  const Owned d_query(DType::kF32, query.cpu.tensor().shape), d_key_value(DType::kF32, key_value.cpu.tensor().shape);
  const OnGpu gpu_d_query(dtype, query.cpu.tensor().shape), gpu_d_key_value(dtype, key_value.cpu.tensor().shape);
  MlaSplitHeads.cpu({}, d_qkv.cpu, cosine.cpu, sine.cpu, o, pairs, dtype, d_query, d_key_value, d_down.cpu);
  MlaSplitHeads(gpu, d_qkv.gpu, cosine.gpu, sine.gpu, o, pairs, dtype, gpu_d_query, gpu_d_key_value, d_down.gpu);
  EXPECT_EQ(gpu_d_query.ToValues(), d_query.ToValues());
  EXPECT_EQ(gpu_d_key_value.ToValues(), d_key_value.ToValues());
  EXPECT_EQ(d_down.gpu.ToValues(), d_down.cpu.ToValues());
}

TEST(MlaHeadsCuda, SmallShapesEqualTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const Problem problems[] = {{1, 1, {1, 1, 2, 1}, 1, 1},
                              {7, 2, {3, 5, 6, 9}, 11, 3},
                              {5, 3, {2, 128, 64, 128}, 512, 32},
                              {4, 1, {16, 12, 8, 20}, 32, 3}};  // Not all of the second part is turned.
  for (const DType dtype : kGpuTypes) {
    for (const Problem& problem : problems) {
      ExpectTwinsAgree(gpu, problem, RotaryPairs::kHalves, dtype);
      ExpectTwinsAgree(gpu, problem, RotaryPairs::kInterleaved, dtype);
    }
  }
}

TEST(MlaHeadsCuda, SmallCopyOfColumns) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    const Twin from(dtype, {5, 2, 13}, 1), to(dtype, {10, 9}, 2);
    CopyColumns.cpu({}, from.cpu, 4, to.cpu, 2, 7, dtype);
    CopyColumns(gpu, from.gpu, 4, to.gpu, 2, 7, dtype);
    EXPECT_EQ(to.gpu.ToValues(), to.cpu.ToValues());
    EXPECT_THROW(CopyColumns(gpu, from.gpu, 7, to.gpu, 2, 7, dtype), EngineError);
  }
}

}  // namespace
}  // namespace mbridge::test
