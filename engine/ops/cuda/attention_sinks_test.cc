#include "engine/ops/attention_sinks.h"

#include "engine/ops/cuda/attention_test_problem.h"
#include "engine/ops/cuda/flash_attention_graph.h"
#include "engine/ops/flash_attention.h"

namespace mbridge::test {
namespace {

// The kernels alone, between which the rows of a softmax are put together by hand: with a probability of 1 for one key, a row's
// context is that key's value, and the sink takes its share of it.
TEST(AttentionSinksCuda, SmallRowsAreScaled) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kS = 3, kB = 2, kHeads = 5, kSize = 40, kRows = kS * kB * kHeads;
  for (const DType dtype : kGpuTypes) {
    const Values scores = RandomValues(kHeads, 1, 3.0, dtype), values = RandomValues(kRows * kSize, 2, 1.0, dtype);
    const Values stats = RandomValues(kRows, 3, 4.0, DType::kF32), gradients = RandomValues(kRows * kSize, 4, 1.0, dtype);
    const OnGpu sinks(dtype, {kHeads}, scores), rows(DType::kF32, {kB, kHeads, kS}),
        d_sinks(DType::kF32, {kHeads}, Values(kHeads, 0.5));
    const OnGpu context(dtype, {kS, kB, kHeads * kSize}, values), d_context(dtype, {kS, kB, kHeads * kSize}, gradients);
    const OnGpu all_stats(DType::kF32, {kB, kHeads, kS}, stats);
    const AttentionSinks all{sinks, rows, d_sinks};
    AddSinksToFlash(gpu, all, all_stats, context);
    const Values scaled = context.ToValues(), probabilities = rows.ToValues(), normalisers = all_stats.ToValues();
    Values expected(kHeads, 0.0);
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t head = i % kHeads, place = i % (kHeads * kB) * kS + i / (kHeads * kB);
      const double normaliser = std::log(std::exp(stats[place]) + std::exp(scores[head]));
      EXPECT_NEAR(normalisers[place], normaliser, 2e-6 * std::max(1.0, std::fabs(normaliser)));
      EXPECT_NEAR(probabilities[place], std::exp(scores[head] - normaliser), 1e-5);
      double dot = 0;
      for (int64_t j = 0; j < kSize; ++j) {
        const double wanted = values[i * kSize + j] * std::exp(stats[place] - normaliser);
        EXPECT_NEAR(scaled[i * kSize + j], wanted, 0.01 * std::fabs(wanted) + 1e-6);
        dot += scaled[i * kSize + j] * gradients[i * kSize + j];
      }
      expected[head] -= dot * probabilities[place];
    }
    for (double& x : expected) x = RoundTo(dtype, x) + 0.5;
    FlashSinkGradients(gpu, d_context, context, dtype, all);
    ExpectNear(d_sinks.ToValues(), expected, dtype == DType::kF32 ? 1e-5 : 1e-2, 1e-5);
  }
}

TEST(AttentionSinksCuda, SmallFlashAttentionWithSinksNearTheExactResult) {
  MB_NEEDS_GPU();
  if (const std::string reason = cuda::FlashAttentionBackend(); !reason.empty()) GTEST_SKIP() << reason;
  const Gpu gpu;
  for (const AttentionShape& shape : {AttentionShape{129, 2, 8, 2, 64, 0.0, 0, false, 0.0f, 0, true},
                                      AttentionShape{200, 1, 4, 4, 128, 0.0, 64, false, 0.0f, 0, true}}) {
    const AttentionProblem problem(shape, DType::kBF16);
    const AttentionOptions& o = problem.options;
    const FlashAttentionOptions options{.seq_length = o.seq_length,
                                        .batch = o.batch,
                                        .heads = o.heads,
                                        .groups = o.groups,
                                        .head_size = o.head_size,
                                        .scale = o.scale,
                                        .window = o.window};
    const OnGpu qkv(DType::kBF16, problem.QkvShape(), problem.qkv),
        d_context(DType::kBF16, problem.ContextShape(), problem.d_context);
    const OnGpu context(DType::kBF16, problem.ContextShape()), d_qkv(DType::kBF16, problem.QkvShape());
    const OnGpu stats(DType::kF32, problem.RowShape()), workspace(DType::kU8, {FlashAttentionWorkspaceBytes(options)});
    const OnGpu sinks(DType::kBF16, problem.SinkShape(), problem.sinks), rows(DType::kF32, problem.RowShape());
    const OnGpu d_sinks(DType::kF32, problem.SinkShape(), Values(problem.sinks.size()));
    const AttentionSinks all{sinks, rows, d_sinks};
    FlashAttentionForward(gpu, qkv, options, stats, context, workspace);
    AddSinksToFlash(gpu, all, stats, context);
    FlashAttentionBackward(gpu, d_context, qkv, context, stats, options, d_qkv, workspace);
    FlashSinkGradients(gpu, d_context, context, DType::kBF16, all);
    const AttentionResult result{context.ToValues(), d_qkv.ToValues(), d_sinks.ToValues()};
    ExpectClose(problem, result, SolveInDouble(problem), 1.2e-2);
  }
}

}  // namespace
}  // namespace mbridge::test
