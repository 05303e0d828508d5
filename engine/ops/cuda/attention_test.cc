#include "engine/ops/attention.h"

#include "engine/ops/cuda/attention_test_problem.h"

namespace mbridge::test {
namespace {

AttentionResult SolveOnGpu(const Gpu& gpu, const AttentionProblem& problem, Values* probabilities_out = nullptr) {
  AttentionOptions o = problem.options;
  const DType dtype = o.precision;
  const OnGpu qkv(dtype, problem.QkvShape(), problem.qkv), d_context(dtype, problem.ContextShape(), problem.d_context);
  const OnGpu context(dtype, problem.ContextShape()), d_qkv(dtype, problem.QkvShape());
  const OnGpu probabilities(ProbabilityType(o), problem.ScoreShape());
  const OnGpu keep(Owned(DType::kU8, problem.keep.empty() ? Shape{0} : problem.ScoreShape(), problem.keep));
  const OnGpu workspace(DType::kU8, {AttentionWorkspaceBytes(o, dtype, 1, DeviceType::kCuda)});
  const Tensor mask = problem.keep.empty() ? Tensor() : keep.tensor();
  const OnGpu sinks(dtype, problem.SinkShape(), problem.sinks), sink_rows(DType::kF32, problem.RowShape());
  const OnGpu d_sinks(DType::kF32, problem.SinkShape(), Values(problem.sinks.size()));
  if (!problem.sinks.empty()) o.sinks = {sinks, sink_rows, d_sinks};
  AttentionForward(gpu, qkv, mask, o, probabilities, context, workspace);
  AttentionBackward(gpu, d_context, qkv, mask, probabilities, o, d_qkv, workspace);
  if (probabilities_out != nullptr) *probabilities_out = probabilities.ToValues();
  return {context.ToValues(), d_qkv.ToValues(), d_sinks.ToValues()};
}

constexpr AttentionShape kShapes[] = {
    {7, 2, 3, 3, 5},
    {9, 2, 4, 2, 3, 0.25, 4},
    {65, 1, 4, 2, 64, 0.25, 0, true},
    {130, 2, 8, 2, 96, 0.0, 0, true},
    {257, 1, 4, 1, 128, 0.0, 100},
    {70, 2, 4, 2, 32, 0.0, 0, false, 2.0f},
    {37, 1, 2, 2, 16, 0.1, 9, true, 1.5f},
    {100, 2, 2, 2, 192, 0.1},
    {64, 1, 4, 4, 256},
    {2, 3, 2, 1, 8},
    {67, 2, 4, 4, 24, 0.0, 0, false, 0.0f, 16},
    {40, 1, 4, 2, 12, 0.0, 7, false, 0.0f, 20},
    {129, 1, 2, 2, 192, 0.0, 0, false, 0.0f, 128},
    {65, 2, 8, 2, 64, 0.0, 0, false, 0.0f, 0, true},
    {33, 2, 4, 4, 16, 0.25, 9, true, 0.0f, 0, true},
};

// Needs no GPU: the CPU twin in F32 beside double precision, on the shapes of the tests below.
TEST(AttentionProblemTest, BothSolutionsAgree) {
  for (const AttentionShape& shape : kShapes) {
    SCOPED_TRACE(fmt::format("s {} b {} heads {} groups {} d {}", shape.s, shape.b, shape.heads, shape.groups, shape.d));
    const AttentionProblem problem(shape, DType::kF32);
    ExpectClose(problem, SolveOnCpu(problem, DType::kF32), SolveInDouble(problem), 2e-6);
  }
}

// Narrow types round at the same places; sums in another order turn a few roundings, which the tolerance leaves room for.
TEST(AttentionCuda, SmallShapesNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    const double near_twin = dtype == DType::kF32 ? 1e-5 : dtype == DType::kBF16 ? 3e-3 : 4e-4;
    const double near_exact = dtype == DType::kF32 ? 1e-5 : dtype == DType::kBF16 ? 1.5e-2 : 2e-3;
    for (const AttentionShape& shape : kShapes) {
      SCOPED_TRACE(fmt::format("{} s {} b {} heads {} groups {} d {}", NameOf(dtype), shape.s, shape.b, shape.heads, shape.groups,
                               shape.d));
      const AttentionProblem problem(shape, dtype);
      const AttentionResult result = SolveOnGpu(gpu, problem);
      ExpectClose(problem, result, SolveOnCpu(problem, dtype), near_twin);
      ExpectClose(problem, result, SolveInDouble(problem), near_exact);
    }
  }
}

TEST(AttentionCuda, KeepsTheProbabilitiesThatAreSeen) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const AttentionProblem problem({33, 2, 4, 2, 16, 0.0, 8}, DType::kF32);
  Values probabilities;
  SolveOnGpu(gpu, problem, &probabilities);
  for (int64_t row = 0; row < 2 * 4 * 33; ++row) {
    const int64_t query = row % 33, begin = std::max<int64_t>(0, query + 1 - 8);
    double sum = 0;
    for (int64_t j = begin; j <= query; ++j) sum += probabilities[row * 33 + j];
    EXPECT_NEAR(sum, 1.0, 1e-5) << row;
  }
}

// More heads than the scratch holds at once: as two problems of half the heads, which fit.
TEST(AttentionCuda, ChunksOfHeads) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kS = 4096, kHeads = 10, kD = 8;
  const AttentionProblem whole({kS, 1, kHeads, kHeads, kD}, DType::kBF16);
  const AttentionResult together = SolveOnGpu(gpu, whole);
  const auto half_of = [](const Values& values, int64_t width, int half) {
    Values part;
    for (int64_t s = 0; s < kS; ++s) {
      const auto row = values.begin() + s * width + half * width / 2;
      part.insert(part.end(), row, row + width / 2);
    }
    return part;
  };
  for (int half = 0; half < 2; ++half) {
    AttentionProblem problem({kS, 1, kHeads / 2, kHeads / 2, kD}, DType::kBF16);
    problem.qkv = half_of(whole.qkv, whole.width(), half);
    problem.d_context = half_of(whole.d_context, whole.context_width(), half);
    const AttentionResult expected{half_of(together.context, whole.context_width(), half),
                                   half_of(together.d_qkv, whole.width(), half)};
    ExpectClose(problem, SolveOnGpu(gpu, problem), expected, 3e-3);
  }
}

TEST(AttentionCuda, WorkspaceIsBounded) {
  const auto bytes = [](int64_t s, int64_t heads, int64_t groups, DType dtype) {
    const AttentionOptions options{.seq_length = s, .batch = 4, .heads = heads, .groups = groups, .head_size = 128};
    return AttentionWorkspaceBytes(options, dtype, 1, DeviceType::kCuda);
  };
  EXPECT_EQ(bytes(512, 8, 8, DType::kBF16), 2 * 4 * 8 * 512 * 512 * 2);
  EXPECT_LE(bytes(4096, 32, 32, DType::kBF16), int64_t{512} << 20);
  EXPECT_EQ(bytes(16384, 32, 32, DType::kBF16), int64_t{2} * 16384 * 16384 * 2);
  EXPECT_EQ(bytes(512, 32, 8, DType::kBF16), 2 * 4 * 8 * 512 * 512 * 2 + 2 * 4 * 32 * 512 * 128 * 2);
}

TEST(AttentionCuda, RefusesSmallScratchAndOtherPrecision) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  AttentionProblem problem({8, 1, 2, 2, 8}, DType::kBF16);
  const OnGpu qkv(DType::kBF16, problem.QkvShape(), problem.qkv), context(DType::kBF16, problem.ContextShape());
  const OnGpu small(DType::kU8, {64}),
      enough(DType::kU8, {AttentionWorkspaceBytes(problem.options, DType::kBF16, 1, DeviceType::kCuda)});
  EXPECT_THROW(AttentionForward(gpu, qkv, {}, problem.options, {}, context, small), EngineError);
  problem.options.precision = DType::kF32;
  EXPECT_THROW(AttentionForward(gpu, qkv, {}, problem.options, {}, context, enough), EngineError);
}

}  // namespace
}  // namespace mbridge::test
