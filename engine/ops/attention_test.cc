#include "engine/ops/attention.h"

#include <omp.h>

#include "engine/ops/dropout.h"
#include "engine/ops/qkv_layout.h"
#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

struct Problem {
  AttentionOptions options;
  Values qkv, mask, d_context, sinks = {};
  QkvLayout layout() const { return {options.heads, options.groups, options.head_size, options.value_size}; }
  int64_t width() const { return layout().width(); }
  int64_t context_width() const { return options.heads * options.value_width(); }
};

Problem MakeProblem(int64_t s, int64_t b, int64_t heads, int64_t groups, int64_t d, double dropout, const Kind& kind,
                    int64_t value_size = 0) {
  Problem problem;
  problem.options = {.seq_length = s,
                     .batch = b,
                     .heads = heads,
                     .groups = groups,
                     .head_size = d,
                     .value_size = value_size,
                     .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d))),
                     .dropout = dropout,
                     .precision = kind.precision};
  problem.qkv = test::RandomValues(s * b * problem.width(), 1, 2.0, kind.precision);
  problem.mask = test::RandomValues(b * heads * s * s, 2);
  for (double& m : problem.mask) m = m > -0.5 ? 1 : 0;
  problem.d_context = test::RandomValues(s * b * problem.context_width(), 3, 1.0, kind.precision);
  return problem;
}

// Element (s, b, head, channel) of queries (part 0), keys (1) or values (2) in qkv.
int64_t At(const Problem& problem, int64_t s, int64_t b, int64_t head, int part, int64_t channel) {
  const QkvLayout layout = problem.layout();
  const int64_t per_group = layout.heads_per_group(), group = head / per_group;
  const int64_t slot = part == 0 ? head % per_group : per_group + part - 1;
  const int64_t group_width = (per_group + 1) * layout.head_size + layout.value_width();
  return (s * problem.options.batch + b) * problem.width() + group * group_width + slot * layout.head_size + channel;
}

// In double precision, without roundings.
Values Reference(const Problem& problem, const Values& qkv, const Values& sinks) {
  const AttentionOptions& o = problem.options;
  Values context(o.seq_length * o.batch * problem.context_width());
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t head = 0; head < o.heads; ++head) {
      for (int64_t i = 0; i < o.seq_length; ++i) {
        Values p(i + 1);
        double sum = sinks.empty() ? 0 : std::exp(sinks[head]);
        const int64_t begin = o.window > 0 ? std::max<int64_t>(0, i + 1 - o.window) : 0;
        for (int64_t j = begin; j <= i; ++j) {
          double score = 0;
          for (int64_t c = 0; c < o.head_size; ++c)
            score += qkv[At(problem, i, b, head, 0, c)] * qkv[At(problem, j, b, head, 1, c)];
          score *= o.scale;
          if (o.soft_cap > 0) score = o.soft_cap * std::tanh(score / o.soft_cap);
          sum += p[j] = std::exp(score);
        }
        for (int64_t j = begin; j <= i; ++j) {
          const double keep =
              o.dropout > 0 ? problem.mask[((b * o.heads + head) * o.seq_length + i) * o.seq_length + j] / (1 - o.dropout) : 1.0;
          for (int64_t c = 0; c < o.value_width(); ++c) {
            context[(i * o.batch + b) * problem.context_width() + head * o.value_width() + c] +=
                p[j] / sum * keep * qkv[At(problem, j, b, head, 2, c)];
          }
        }
      }
    }
  }
  return context;
}

Values Reference(const Problem& problem, const Values& qkv) { return Reference(problem, qkv, problem.sinks); }

struct Result {
  Values context, d_qkv, d_sinks = {};
};

Result Attend(const Problem& problem, const Kind& kind) {
  const AttentionOptions& o = problem.options;
  const int64_t s = o.seq_length, b = o.batch;
  const Owned qkv(kind.storage, {s, b, problem.width()}, problem.qkv), context(kind.storage, {s, b, problem.context_width()});
  const Owned mask(DType::kU8, {b, o.heads, s, s}, problem.mask), probabilities(ProbabilityType(o), {b, o.heads, s, s});
  const Owned d_context(kind.storage, {s, b, problem.context_width()}, problem.d_context),
      d_qkv(kind.storage, {s, b, problem.width()});
  const Owned workspace(DType::kU8, {AttentionWorkspaceBytes(o, kind.storage, omp_get_max_threads())});
  const Tensor keep = o.dropout > 0 ? mask.tensor() : Tensor();
  const Owned sinks(kind.storage, {o.heads}, problem.sinks.empty() ? Values(o.heads) : problem.sinks),
      sink_probabilities(DType::kF32, {b, o.heads, s}), d_sinks(DType::kF32, {o.heads});
  AttentionOptions o_with_sinks = o;
  if (!problem.sinks.empty()) o_with_sinks.sinks = {sinks, sink_probabilities, d_sinks};
  AttentionForward({}, qkv, keep, o_with_sinks, probabilities, context, workspace);
  AttentionBackward({}, d_context, qkv, keep, probabilities, o_with_sinks, d_qkv, workspace);
  return {context.ToValues(), d_qkv.ToValues(), d_sinks.ToValues()};
}

TEST(AttentionTest, AgainstDoublePrecision) {
  struct Case {
    int64_t s, b, heads, groups, d;
    double dropout;
    int64_t window;
    float soft_cap = 0.0f;
  };
  for (const Case& c : {Case{7, 2, 3, 3, 5, 0.0, 0}, Case{9, 1, 2, 2, 4, 0.25, 0}, Case{6, 2, 4, 2, 3, 0.25, 0},
                        Case{9, 2, 4, 2, 3, 0.25, 4}, Case{6, 1, 2, 1, 4, 0.0, 1}, Case{7, 2, 4, 2, 5, 0.25, 0, 1.5f},
                        Case{9, 1, 2, 1, 4, 0.0, 4, 0.7f}, Case{4, 1, 2, 2, 24, 0.0, 0}}) {
    for (bool fp32 : {false, true}) {
      const Kind kind = test::kKinds[0];
      Problem problem = MakeProblem(c.s, c.b, c.heads, c.groups, c.d, c.dropout, kind);
      problem.options.softmax_in_fp32 = fp32;
      problem.options.window = c.window;
      problem.options.soft_cap = c.soft_cap;
      const Result result = Attend(problem, kind);
      test::ExpectNear(result.context, Reference(problem, problem.qkv), 1e-6, 2e-6);
      const Values numeric = test::NumericGradient(
          problem.qkv, [&](const Values& v) { return test::Dot(Reference(problem, v), problem.d_context); });
      test::ExpectNear(result.d_qkv, numeric, 1e-5, 5e-6);
    }
  }
}

// Values of another size than queries and keys, and a learned score without a value in each softmax.
TEST(AttentionTest, ValueSizesAndSinks) {
  const Kind kind = test::kKinds[0];
  for (int64_t value_size : {3, 5, 8}) {
    for (bool fp32 : {false, true}) {
      Problem problem = MakeProblem(9, 2, 4, 2, 5, 0.25, kind, value_size);
      problem.options.softmax_in_fp32 = fp32;
      problem.options.window = 6;
      problem.sinks = test::RandomValues(4, 7, 1.0, DType::kF32);
      const Result result = Attend(problem, kind);
      test::ExpectNear(result.context, Reference(problem, problem.qkv), 1e-6, 2e-6);
      const auto dot = [&](const Values& qkv, const Values& sinks) {
        return test::Dot(Reference(problem, qkv, sinks), problem.d_context);
      };
      test::ExpectNear(result.d_qkv, test::NumericGradient(problem.qkv, [&](const Values& v) { return dot(v, problem.sinks); }),
                       1e-5, 5e-6);
      test::ExpectNear(result.d_sinks, test::NumericGradient(problem.sinks, [&](const Values& v) { return dot(problem.qkv, v); }),
                       1e-5, 5e-6);
    }
  }
}

// More rows than one block holds, so that blocks must join.
TEST(AttentionTest, BlocksJoin) {
  const Kind kind = test::kKinds[0];
  for (int64_t window : {0, 70, 200}) {
    Problem problem = MakeProblem(261, 1, 1, 1, 2, 0.25, kind);
    problem.options.window = window;
    const Result result = Attend(problem, kind);
    test::ExpectNear(result.context, Reference(problem, problem.qkv), 1e-5, 5e-6);
    // Directional derivative instead of every element.
    const Values direction = test::RandomValues(problem.qkv.size(), 9);
    const auto along = [&](double t) {
      Values moved = problem.qkv;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += t * direction[i];
      return test::Dot(Reference(problem, moved), problem.d_context);
    };
    EXPECT_NEAR(test::Dot(result.d_qkv, direction), (along(1e-5) - along(-1e-5)) / 2e-5, 1e-3);
  }
}

TEST(AttentionTest, NarrowTypesStayNearAndKeepTheirBits) {
  const Problem exact = MakeProblem(12, 2, 4, 2, 8, 0.25, test::kKinds[0]);
  for (bool fp32 : {false, true}) {
    Result of_storage[2];
    for (int i = 1; i < 4; ++i) {
      const Kind& kind = test::kKinds[i];
      Problem problem = exact;
      problem.qkv = test::RandomValues(exact.qkv.size(), 1, 2.0, kind.precision);
      problem.d_context = test::RandomValues(exact.d_context.size(), 3, 1.0, kind.precision);
      problem.options.precision = kind.precision;
      problem.options.softmax_in_fp32 = fp32;
      const Result result = Attend(problem, kind);
      if (i < 3) of_storage[i - 1] = result;
      test::ExpectNear(result.context, Reference(problem, problem.qkv), 2 * kind.epsilon(), 3 * kind.epsilon());
      const Values numeric = test::NumericGradient(
          problem.qkv, [&](const Values& v) { return test::Dot(Reference(problem, v), problem.d_context); });
      test::ExpectNear(result.d_qkv, numeric, 4 * kind.epsilon(), 8 * kind.epsilon());
      for (double v : result.d_qkv) EXPECT_EQ(v, test::RoundTo(kind.precision, v));
    }
    if (test::g_on_device) continue;
    // BF16 in F32 storage and in BF16 storage.
    EXPECT_EQ(of_storage[0].context, of_storage[1].context);
    EXPECT_EQ(of_storage[0].d_qkv, of_storage[1].d_qkv);
  }
}

TEST(AttentionTest, RefusesASmallWorkspace) {
  const Problem problem = MakeProblem(4, 1, 1, 1, 2, 0.0, test::kKinds[0]);
  const Owned qkv(DType::kF32, {4, 1, 6}), context(DType::kF32, {4, 1, 2}), workspace(DType::kU8, {8});
  EXPECT_THROW(AttentionForward({}, qkv, {}, problem.options, {}, context, workspace), EngineError);
}

}  // namespace
}  // namespace mbridge
