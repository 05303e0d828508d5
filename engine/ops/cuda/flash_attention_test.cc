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
    {128, 2, 4, 4, 64},
    {200, 2, 8, 2, 64},
    {129, 1, 3, 3, 128},
    {256, 2, 4, 1, 128},
    {77, 3, 4, 2, 96},
    {130, 1, 4, 2, 192},
    {192, 2, 2, 1, 256},
    {2, 1, 2, 2, 64},
    {384, 1, 2, 2, 128, 0.0, 100},
    {257, 2, 4, 2, 64, 0.0, 64},
    {130, 1, 4, 2, 96, 0.0, 33},
    {201, 1, 2, 1, 192, 0.0, 70},
    {150, 2, 2, 2, 256, 0.0, 64},
};

TEST_F(FlashAttentionCuda, SmallShapesNearTheExactResult) {
  const Gpu gpu;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const AttentionShape& shape : kShapes) {
      SCOPED_TRACE(fmt::format("{} s {} b {} heads {} groups {} d {} window {}", NameOf(dtype), shape.s, shape.b, shape.heads,
                               shape.groups, shape.d, shape.window));
      const AttentionProblem problem(shape, dtype);
      const FlashResult result = SolveByFlash(gpu, problem);
      // With two keys the gradients of the scores are small differences, of which the rounded output takes a larger part.
      const double tolerance = (dtype == DType::kBF16 ? 1.2e-2 : 1.6e-3) * (shape.s < 8 ? 4 : 1);
      ExpectClose(problem, result.values, SolveOnCpu(problem, DType::kF32), tolerance);
      ExpectClose(problem, result.values, SolveInDouble(problem), tolerance);
      ExpectNear(result.stats, LogSums(problem), 1e-4, 1e-4);
    }
  }
}

// Both directions of a problem that flash attention takes and AttentionProblem does not describe.
AttentionResult SolveDirections(const Gpu& gpu, const FlashAttentionOptions& options, DType dtype, const Values& qkv_values,
                                const Values& d_context_values) {
  const Shape qkv_shape{options.seq_length, options.batch,
                        static_cast<int64_t>(qkv_values.size()) / options.seq_length / options.batch};
  const Shape context_shape{options.seq_length, options.batch, options.heads * options.value_width()};
  const OnGpu qkv(dtype, qkv_shape, qkv_values), d_context(dtype, context_shape, d_context_values);
  const OnGpu context(dtype, context_shape), d_qkv(dtype, qkv_shape);
  const OnGpu stats(DType::kF32, {options.batch * options.heads * options.seq_length});
  const OnGpu workspace(DType::kU8, {FlashAttentionWorkspaceBytes(options)});
  FlashAttentionForward(gpu, qkv, options, stats, context, workspace);
  FlashAttentionBackward(gpu, d_context, qkv, context, stats, options, d_qkv, workspace);
  return {.context = context.ToValues(), .d_qkv = d_qkv.ToValues()};
}

constexpr double kBF16Tolerance = 1.2e-2;

// Latent attention: queries and keys of 192, values of 128.
TEST_F(FlashAttentionCuda, SmallValuesOfAnotherWidth) {
  const Gpu gpu;
  constexpr int64_t kS = 150, kB = 2, kHeads = 3, kD = 192, kValue = 128;
  const QkvLayout layout{kHeads, kHeads, kD, kValue};
  const Values qkv = RandomValues(kS * kB * layout.width(), 1, 2.0, DType::kBF16);
  const Values d_context = RandomValues(kS * kB * kHeads * kValue, 2, 1.0, DType::kBF16);
  const float scale = 1.0f / std::sqrt(static_cast<float>(kD));
  const AttentionResult actual = SolveDirections(
      gpu,
      {.seq_length = kS, .batch = kB, .heads = kHeads, .groups = kHeads, .head_size = kD, .scale = scale, .value_size = kValue},
      DType::kBF16, qkv, d_context);
  const AttentionResult expected = SolveInDouble(
      {.seq_length = kS, .batch = kB, .heads = kHeads, .groups = kHeads, .head_size = kD, .value_size = kValue, .scale = scale},
      qkv, d_context);
  EXPECT_LT(RelativeError(actual.context, expected.context), kBF16Tolerance);
  EXPECT_LT(RelativeError(actual.d_qkv, expected.d_qkv), kBF16Tolerance);
}

struct PackedCase {
  int64_t s, b, heads, groups, d, value_size, window, most;
  std::vector<std::vector<int64_t>> lengths;  // Of the sequences of each sample.
};

// Each sequence by itself.
AttentionResult SolveEachSequence(const PackedCase& c, float scale, const Values& qkv, const Values& d_context) {
  const int64_t value = c.value_size > 0 ? c.value_size : c.d, width = QkvLayout{c.heads, c.groups, c.d, value}.width();
  const int64_t context_width = c.heads * value;
  AttentionResult all{.context = Values(d_context.size()), .d_qkv = Values(qkv.size())};
  for (int64_t sample = 0; sample < c.b; ++sample) {
    int64_t first = 0;
    for (const int64_t length : c.lengths[sample]) {
      const auto copy = [&](const Values& from, int64_t row) {
        Values part;
        for (int64_t t = first; t < first + length; ++t) {
          const auto begin = from.begin() + (t * c.b + sample) * row;
          part.insert(part.end(), begin, begin + row);
        }
        return part;
      };
      const auto put = [&](const Values& part, int64_t row, Values* to) {
        for (int64_t t = 0; t < length; ++t) {
          std::copy_n(part.begin() + t * row, row, to->begin() + ((first + t) * c.b + sample) * row);
        }
      };
      const AttentionResult part = SolveInDouble({.seq_length = length,
                                                  .batch = 1,
                                                  .heads = c.heads,
                                                  .groups = c.groups,
                                                  .head_size = c.d,
                                                  .value_size = value,
                                                  .scale = scale,
                                                  .window = c.window},
                                                 copy(qkv, width), copy(d_context, context_width));
      put(part.context, context_width, &all.context);
      put(part.d_qkv, width, &all.d_qkv);
      first += length;
    }
  }
  return all;
}

TEST_F(FlashAttentionCuda, SmallPackedSequences) {
  const Gpu gpu;
  const PackedCase cases[] = {
      {200, 1, 2, 2, 64, 0, 0, 3, {{70, 1, 129}}},
      {200, 1, 8, 2, 64, 0, 0, 8, {{30, 170}}},  // Most sequences are empty.
      {260, 2, 4, 2, 128, 0, 0, 3, {{128, 132}, {5, 200, 55}}},
      {192, 1, 2, 1, 96, 0, 0, 2, {{100, 92}}},
      {300, 1, 4, 2, 128, 0, 40, 2, {{111, 189}}},
      {160, 2, 3, 3, 192, 128, 0, 2, {{60, 100}, {160}}},
      {128, 1, 2, 1, 256, 0, 0, 2, {{64, 64}}},
  };
  for (const PackedCase& c : cases) {
    SCOPED_TRACE(fmt::format("s {} b {} heads {} groups {} d {} values {} window {} sequences {}", c.s, c.b, c.heads, c.groups,
                             c.d, c.value_size, c.window, c.most));
    Values bounds;
    for (const auto& lengths : c.lengths) {
      int64_t end = 0;
      bounds.push_back(0);
      for (int64_t i = 0; i < c.most; ++i) {
        if (i < static_cast<int64_t>(lengths.size())) end += lengths[i];
        bounds.push_back(static_cast<double>(end));
      }
      ASSERT_EQ(end, c.s);
    }
    const OnGpu cu_seqlens(DType::kI32, {c.b, c.most + 1}, bounds);
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.d));
    const int64_t value = c.value_size > 0 ? c.value_size : c.d;
    const Values qkv = RandomValues(c.s * c.b * QkvLayout{c.heads, c.groups, c.d, value}.width(), 1, 2.0, DType::kBF16);
    const Values d_context = RandomValues(c.s * c.b * c.heads * value, 2, 1.0, DType::kBF16);
    const AttentionResult actual = SolveDirections(gpu,
                                                   {.seq_length = c.s,
                                                    .batch = c.b,
                                                    .heads = c.heads,
                                                    .groups = c.groups,
                                                    .head_size = c.d,
                                                    .scale = scale,
                                                    .window = c.window,
                                                    .value_size = c.value_size,
                                                    .sequences = c.most,
                                                    .cu_seqlens = cu_seqlens},
                                                   DType::kBF16, qkv, d_context);
    const AttentionResult expected = SolveEachSequence(c, scale, qkv, d_context);
    EXPECT_LT(RelativeError(actual.context, expected.context), kBF16Tolerance) << "context";
    EXPECT_LT(RelativeError(actual.d_qkv, expected.d_qkv), kBF16Tolerance) << "gradient";
  }
}

// Values that are unit vectors show each probability, and so which of them were kept.
void Chechead_sizeropout(const Gpu& gpu, int64_t head_size) {
  constexpr int64_t kS = 64, kB = 2, kHeads = 4, kGroups = 2;

  const QkvLayout layout{kHeads, kGroups, head_size};
  const AttentionOptions exact{.seq_length = kS,
                               .batch = kB,
                               .heads = kHeads,
                               .groups = kGroups,
                               .head_size = head_size,
                               .scale = 0.125f,
                               .dropout = 0.25};
  const OnGpu random(DType::kI64, {2});
  const int64_t seed_and_offset[] = {1234, 5};
  MB_CUDA(cudaMemcpy(random.tensor().data, seed_and_offset, sizeof(seed_and_offset), cudaMemcpyHostToDevice));
  const FlashAttentionOptions options{.seq_length = kS,
                                      .batch = kB,
                                      .heads = kHeads,
                                      .groups = kGroups,
                                      .head_size = head_size,
                                      .scale = 0.125f,
                                      .dropout = 0.25,
                                      .random = random};
  Values qkv = RandomValues(kS * kB * layout.width(), 1, 1.0, DType::kBF16);
  const Values d_context = RandomValues(kS * kB * kHeads * head_size, 2, 1.0, DType::kBF16);
  Values unit = qkv;
  for (int64_t token = 0; token < kS * kB; ++token) {
    for (int64_t group = 0; group < kGroups; ++group) {
      for (int64_t i = 0; i < head_size; ++i)
        unit[token * layout.width() + layout.value_column(group) + i] = i == token / kB ? 1 : 0;
    }
  }
  const Values shown = SolveDirections(gpu, options, DType::kBF16, unit, d_context).context;
  Values keep(kB * kHeads * kS * kS, 1.0);
  int64_t kept = 0;
  for (int64_t b = 0; b < kB; ++b) {
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t query = 0; query < kS; ++query) {
        for (int64_t key = 0; key <= query; ++key) {
          const bool is_kept = shown[(query * kB + b) * kHeads * head_size + head * head_size + key] != 0;
          keep[((b * kHeads + head) * kS + query) * kS + key] = is_kept ? 1 : 0;
          kept += is_kept ? 1 : 0;
        }
      }
    }
  }
  const double seen = kB * kHeads * kS * (kS + 1) / 2.0;
  EXPECT_NEAR(static_cast<double>(kept) / seen, 0.75, 5 * std::sqrt(0.75 * 0.25 / seen));
  const AttentionResult actual = SolveDirections(gpu, options, DType::kBF16, qkv, d_context);
  const AttentionResult expected = SolveInDouble(exact, qkv, d_context, keep);
  EXPECT_LT(RelativeError(actual.context, expected.context), kBF16Tolerance);
  EXPECT_LT(RelativeError(actual.d_qkv, expected.d_qkv), kBF16Tolerance);
}

TEST_F(FlashAttentionCuda, SmallDropoutIsExactByItsOwnMask) {
  const Gpu gpu;
  for (const int64_t head_size : {64, 96, 128, 192, 256}) {
    SCOPED_TRACE(head_size);
    Chechead_sizeropout(gpu, head_size);
  }
}

TEST_F(FlashAttentionCuda, DeterministicRunsAreEqual) {
  const Gpu gpu;
  const AttentionProblem problem({512, 1, 8, 2, 64}, DType::kBF16);
  const FlashResult first = SolveByFlash(gpu, problem, true), second = SolveByFlash(gpu, problem, true);
  EXPECT_EQ(first.values.context, second.values.context);
  EXPECT_EQ(first.values.d_qkv, second.values.d_qkv);
  ExpectClose(problem, first.values, SolveInDouble(problem), kBF16Tolerance);
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
  bad = good;
  bad.dropout = 1.0;
  EXPECT_THAT(FlashAttentionRefusal(bad, DType::kBF16), testing::HasSubstr("below 1, not 1"));
  bad = good;
  bad.sequences = 2;
  EXPECT_EQ(FlashAttentionRefusal(bad, DType::kBF16), "");
  bad.head_size = 72;
  EXPECT_THAT(FlashAttentionRefusal(bad, DType::kBF16), testing::HasSubstr("multiples of 16, not 72"));
}

}  // namespace
}  // namespace mbridge::test
