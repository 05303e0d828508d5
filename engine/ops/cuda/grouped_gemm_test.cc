#include "engine/ops/grouped_gemm.h"

#include <numeric>

#include "engine/ops/cuda/twin_test.h"

namespace mbridge::test {
namespace {

// Rows of each expert, and the weight's shape.
struct Problem {
  std::vector<int> counts;
  int64_t out, in;
};

// One tensor [experts, ...] cut into the experts'.
std::vector<Tensor> Cut(const Tensor& all) {
  std::vector<Tensor> parts;
  for (int64_t e = 0; e < all.shape[0]; ++e) parts.push_back(all.Rows(e, 1).View({all.shape[1], all.shape[2]}));
  return parts;
}

void ExpectTwinsAgree(const Gpu& gpu, const Problem& problem, DType dtype) {
  const auto experts = static_cast<int64_t>(problem.counts.size());
  const int64_t out = problem.out, in = problem.in;
  SCOPED_TRACE(fmt::format("{} {} experts [{}, {}]", NameOf(dtype), experts, out, in));
  Values offset_values(1, 0);
  for (const int count : problem.counts) offset_values.push_back(offset_values.back() + count);
  const auto rows = static_cast<int64_t>(offset_values.back());
  const Twin offsets(DType::kI32, {experts + 1}, offset_values);
  const Owned cpu_offsets(DType::kI32, {experts + 1}, offset_values);
  const Twin x(dtype, {rows, in}, 1), dy(dtype, {rows, out}, 2), weights(dtype, {experts, out, in}, 3);
  // Sums of up to `in` products: a step of the type, and what F32 sums in another order leave.
  const double absolute = dtype == DType::kF32 ? 2e-5 : 1e-4;

  const Owned y(DType::kF32, {rows, out}), dx(DType::kF32, {rows, in});
  const OnGpu gpu_y(dtype, {rows, out}), gpu_dx(dtype, {rows, in});
  GroupedGemm.cpu({}, x.cpu, Cut(weights.cpu), cpu_offsets, y);
  GroupedGemm(gpu, x.gpu, Cut(weights.gpu), offsets.gpu, gpu_y);
  ExpectNear(gpu_y.ToValues(), y.ToValues(), StepOf(dtype), absolute);
  GroupedGemmInputGradient.cpu({}, dy.cpu, Cut(weights.cpu), cpu_offsets, dx);
  GroupedGemmInputGradient(gpu, dy.gpu, Cut(weights.gpu), offsets.gpu, gpu_dx);
  ExpectNear(gpu_dx.ToValues(), dx.ToValues(), StepOf(dtype), absolute);

  const Owned scratch(DType::kF32, {out * in});
  for (const DType precision : {DType::kF32, dtype}) {
    const Twin grads(DType::kF32, {experts, out, in}, 4);
    GroupedGemmWeightGradient.cpu({}, dy.cpu, x.cpu, cpu_offsets, precision, Cut(grads.cpu), scratch);
    GroupedGemmWeightGradient(gpu, dy.gpu, x.gpu, offsets.gpu, precision, Cut(grads.gpu), {});
    // A rounding that turns is a step of the product, which is larger than its sum with the gradient may be.
    const double turned = precision == DType::kF32 ? 0.0 : StepOf(precision) * std::sqrt(static_cast<double>(rows));
    ExpectNear(grads.gpu.ToValues(), grads.cpu.ToValues(), StepOf(precision), absolute + turned);
  }
}

TEST(GroupedGemmCuda, SmallShapesNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    ExpectTwinsAgree(gpu, {{3, 0, 1}, 3, 5}, dtype);               // No vectors.
    ExpectTwinsAgree(gpu, {{0, 5, 0, 0, 130, 1}, 24, 40}, dtype);  // One step of depth, rows beyond a tile.
    ExpectTwinsAgree(gpu, {{7}, 136, 200}, dtype);                 // A tile and a bit each way, depth of several steps.
    ExpectTwinsAgree(gpu, {{0, 0, 9}, 8, 8}, dtype);
  }
}

TEST(GroupedGemmCuda, NearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  std::vector<int> many(70);  // More than a warp looks at in one go.
  for (size_t e = 0; e < many.size(); ++e) many[e] = static_cast<int>(e * 7 % 19);
  for (const DType dtype : kGpuTypes) {
    ExpectTwinsAgree(gpu, {many, 72, 96}, dtype);
    ExpectTwinsAgree(gpu, {{128, 256, 300, 0}, 256, 384}, dtype);  // Whole tiles; a ring that turns more than once.
    ExpectTwinsAgree(gpu, {{201, 77}, 129, 257}, dtype);           // Wide, no vectors.
  }
}

TEST(GroupedGemmCuda, LeavesGradientsOfExpertsWithoutRows) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const OnGpu offsets(DType::kI32, {3}, {0, 0, 4}), x(DType::kBF16, {4, 8}, Values(32, 1.0)),
      grads(DType::kF32, {2, 8, 8}, Values(128, 0.5));
  GroupedGemmWeightGradient(gpu, x, x, offsets, DType::kF32, Cut(grads), {});
  Values expected(128, 0.5);
  std::fill(expected.begin() + 64, expected.end(), 4.5);
  EXPECT_EQ(grads.ToValues(), expected);
}

TEST(GroupedGemmCuda, RefusesTensorsThatAreNotEquallyFarApart) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const OnGpu offsets(DType::kI32, {4}, {0, 1, 2, 3}), x(DType::kBF16, {3, 8}, Values(24)),
      weights(DType::kBF16, {5, 8, 8}, Values(320));
  const std::vector<Tensor> all = Cut(weights);
  EXPECT_THROW(GroupedGemm(gpu, x, std::vector{all[0], all[1], all[4]}, offsets, x), EngineError);
  EXPECT_THROW(GroupedGemm(gpu, x, std::vector{all[0], all[1]}, offsets, x), EngineError) << "offsets of three experts";
}

}  // namespace
}  // namespace mbridge::test
