#include "engine/ops/flash_attention.h"

#include <numeric>

#include <gmock/gmock.h>

#include "engine/ops/cuda/attention_test_problem.h"
#include "engine/ops/cuda/flash_attention_graph.h"

namespace mbridge::test {
namespace {

class FlashAttentionCuda : public testing::Test {
 protected:
  void SetUp() override {
    MB_NEEDS_GPU();
    if (const std::string reason = cuda::FlashAttentionBackend(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

FlashAttentionOptions FlashOptions(const AttentionProblem& problem, bool deterministic = false) {
  const AttentionOptions& o = problem.options;
  return {.seq_length = o.seq_length,
          .batch = o.batch,
          .heads = o.heads,
          .groups = o.groups,
          .head_size = o.head_size,
          .scale = o.scale,
          .window = o.window,
          .deterministic = deterministic};
}

struct FlashResult {
  AttentionResult values;
  Values stats;
};

FlashResult SolveByFlash(const Gpu& gpu, const AttentionProblem& problem, bool deterministic = false) {
  const FlashAttentionOptions options = FlashOptions(problem, deterministic);
  const DType dtype = problem.options.precision;
  const OnGpu qkv(dtype, problem.QkvShape(), problem.qkv), d_context(dtype, problem.ContextShape(), problem.d_context);
  const OnGpu context(dtype, problem.ContextShape()), d_qkv(dtype, problem.QkvShape());
  const OnGpu stats(DType::kF32, {options.batch, options.heads, options.seq_length});
  const OnGpu workspace(DType::kU8, {FlashAttentionWorkspaceBytes(options)});
  FlashAttentionForward(gpu, qkv, options, stats, context, workspace);
  FlashAttentionBackward(gpu, d_context, qkv, context, stats, options, d_qkv, workspace);
  return {{context.ToValues(), d_qkv.ToValues()}, stats.ToValues()};
}

// log(sum(exp(scale q k))) of the keys that each query sees, in double.
Values LogSums(const AttentionProblem& problem) {
  const AttentionOptions& o = problem.options;
  const QkvLayout layout{o.heads, o.groups, o.head_size};
  Values sums(o.batch * o.heads * o.seq_length);
  const auto at = [&](int64_t s, int64_t b, int64_t column) { return (s * o.batch + b) * layout.width() + column; };
  for (int64_t row = 0; row < static_cast<int64_t>(sums.size()); ++row) {
    const int64_t query = row % o.seq_length, head = row / o.seq_length % o.heads, b = row / o.seq_length / o.heads;
    const double* q = &problem.qkv[at(query, b, layout.query_column(head))];
    double sum = 0;
    for (int64_t key = o.window > 0 ? std::max<int64_t>(0, query + 1 - o.window) : 0; key <= query; ++key) {
      const double* k = &problem.qkv[at(key, b, layout.key_column(head / layout.heads_per_group()))];
      sum += std::exp(o.scale * std::inner_product(q, q + o.head_size, k, 0.0));
    }
    sums[row] = std::log(sum);
  }
  return sums;
}

constexpr AttentionShape kShapes[] = {
    {128, 2, 4, 4, 64},  {200, 2, 8, 2, 64},  {129, 1, 3, 3, 128}, {256, 2, 4, 1, 128},           {77, 3, 4, 2, 96},
    {130, 1, 4, 2, 192}, {192, 2, 2, 1, 256}, {2, 1, 2, 2, 64},    {384, 1, 2, 2, 128, 0.0, 100}, {257, 2, 4, 2, 64, 0.0, 64},
};

TEST_F(FlashAttentionCuda, SmallShapesNearTheExactResult) {
  const Gpu gpu;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const AttentionShape& shape : kShapes) {
      if (dtype == DType::kF16 && shape.d != 64) continue;
      SCOPED_TRACE(fmt::format("{} s {} b {} heads {} groups {} d {} window {}", NameOf(dtype), shape.s, shape.b, shape.heads,
                               shape.groups, shape.d, shape.window));
      const AttentionProblem problem(shape, dtype);
      const FlashResult result = SolveByFlash(gpu, problem);
      // With two keys the gradients of the scores are small differences, of which the rounded output takes a larger part.
      const double tolerance = (dtype == DType::kBF16 ? 1.2e-2 : 1.6e-3) * (shape.s < 8 ? 4 : 1);
      ExpectClose(problem, result.values, SolveOnCpu(problem, DType::kF32), tolerance);
      ExpectNear(result.stats, LogSums(problem), 1e-4, 1e-4);
    }
  }
}

TEST_F(FlashAttentionCuda, DeterministicRunsAreEqual) {
  const Gpu gpu;
  const AttentionProblem problem({512, 1, 8, 2, 64}, DType::kBF16);
  const FlashResult first = SolveByFlash(gpu, problem, true), second = SolveByFlash(gpu, problem, true);
  EXPECT_EQ(first.values.context, second.values.context);
  EXPECT_EQ(first.values.d_qkv, second.values.d_qkv);
  ExpectClose(problem, first.values, SolveOnCpu(problem, DType::kF32), 1.2e-2);
}

TEST_F(FlashAttentionCuda, ReplaysInAGraph) {
  const Gpu gpu;
  const AttentionProblem problem({256, 1, 4, 2, 64}, DType::kBF16);
  const FlashAttentionOptions options = FlashOptions(problem);
  const OnGpu qkv(DType::kBF16, problem.QkvShape(), problem.qkv), context(DType::kBF16, problem.ContextShape());
  const OnGpu stats(DType::kF32, {1, 4, 256}), workspace(DType::kU8, {FlashAttentionWorkspaceBytes(options)});
  PrepareFlashAttention(gpu, options, DType::kBF16);
  const auto stream = static_cast<cudaStream_t>(gpu.context().stream);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  MB_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  FlashAttentionForward(gpu, qkv, options, stats, context, workspace);
  MB_CUDA(cudaStreamEndCapture(stream, &graph));
  MB_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  MB_CUDA(cudaGraphLaunch(executable, stream));
  EXPECT_LT(RelativeError(context.ToValues(), SolveOnCpu(problem, DType::kF32).context), 1.2e-2);
  MB_CUDA(cudaGraphExecDestroy(executable));
  MB_CUDA(cudaGraphDestroy(graph));
}

TEST_F(FlashAttentionCuda, RefusesWrongTensors) {
  const Gpu gpu;
  const AttentionProblem problem({64, 1, 2, 2, 64}, DType::kBF16);
  const FlashAttentionOptions options = FlashOptions(problem);
  const OnGpu qkv(DType::kBF16, problem.QkvShape(), problem.qkv), context(DType::kBF16, problem.ContextShape());
  const OnGpu stats(DType::kF32, {2 * 64}), short_stats(DType::kF32, {2 * 63}), workspace(DType::kU8, {16});
  EXPECT_THROW(FlashAttentionForward(gpu, qkv, options, short_stats, context, workspace), EngineError);
  EXPECT_THROW(FlashAttentionForward(gpu, qkv, options, stats, context, Tensor()), EngineError);
}

TEST(FlashAttentionRules, NameTheReason) {
  if (!cuda::FlashAttentionBackend().empty()) GTEST_SKIP() << cuda::FlashAttentionBackend();
  const FlashAttentionOptions good{.seq_length = 64, .batch = 1, .heads = 4, .groups = 2, .head_size = 64};
  EXPECT_EQ(FlashAttentionRefusal(good, DType::kBF16), "");
  EXPECT_THAT(FlashAttentionRefusal(good, DType::kF32), testing::HasSubstr("not F32"));
  FlashAttentionOptions bad = good;
  bad.head_size = 260;
  EXPECT_THAT(FlashAttentionRefusal(bad, DType::kBF16), testing::HasSubstr("up to 256, not 260"));
  bad = good;
  bad.seq_length = 1;
  EXPECT_THAT(FlashAttentionRefusal(bad, DType::kBF16), testing::HasSubstr("not 1"));
  bad = good;
  bad.groups = 3;
  EXPECT_THAT(FlashAttentionRefusal(bad, DType::kBF16), testing::HasSubstr("no multiple"));
}

}  // namespace
}  // namespace mbridge::test
