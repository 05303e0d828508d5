#include "engine/ops/attention.h"

#include <omp.h>

#include "engine/ops/dropout.h"
#include "engine/ops/qkv_layout.h"
#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
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

// What of a row of scores, between the products, may come out.
struct RowBounds {
  int64_t begin;  // First key that is seen.
  Bounds capped;  // tanh(U / cap) of each key.
  Bounds probability;
  Bounded of_sink;
};

class NarrowAttention {
 public:
  NarrowAttention(const Problem& problem, const Kind& kind)
      : problem_(problem), o_(problem.options), kind_(kind), precision_(kind.precision) {}

  RowBounds Row(int64_t b, int64_t head, int64_t i) const {
    RowBounds row{o_.window > 0 ? std::max<int64_t>(0, i + 1 - o_.window) : 0, {}, {}, 0};
    Bounds scores;
    for (int64_t j = row.begin; j <= i; ++j) {
      test::Sum sum;
      for (int64_t c = 0; c < o_.head_size; ++c) sum.Add(Qkv(i, b, head, 0, c) * Qkv(j, b, head, 1, c));
      const Bounded product = Bounded(o_.scale) * sum.Total(test::kTensorCoreUnit);
      row.capped.push_back(o_.soft_cap > 0 ? Tanh(product / o_.soft_cap) : Bounded(0));
      scores.push_back(Stored(o_.soft_cap > 0 ? o_.soft_cap * row.capped.back() : product, precision_));
    }
    double largest = problem_.sinks.empty() ? scores[0].value : problem_.sinks[head];
    for (const Bounded& score : scores) largest = std::max(largest, score.value);
    const Bounded sink = problem_.sinks.empty() ? Bounded(0) : Exp(Bounded(problem_.sinks[head]) - largest);
    test::Sum sum;
    sum.Add(sink);
    for (const Bounded& score : scores) sum.Add(Exp(score - largest));
    for (const Bounded& score : scores) row.probability.push_back(Exp(score - largest) / sum.Total());
    row.of_sink = sink / sum.Total();
    return row;
  }
  // round(round(P) keep scale).
  Bounded Dropped(const Bounded& probability, int64_t b, int64_t head, int64_t i, int64_t j) const {
    return Keep(Stored(probability, precision_), b, head, i, j);
  }
  // round(x keep scale), or x without dropout.
  Bounded Keep(const Bounded& x, int64_t b, int64_t head, int64_t i, int64_t j) const {
    if (o_.dropout == 0) return x;
    return Stored(x * problem_.mask[Plane(b, head, i, j)] * DropoutScale(DropoutKind::kEager, o_.dropout), precision_);
  }
  int64_t Plane(int64_t b, int64_t head, int64_t i, int64_t j) const {
    return ((b * o_.heads + head) * o_.seq_length + i) * o_.seq_length + j;
  }
  int64_t ContextAt(int64_t i, int64_t b, int64_t head, int64_t c) const {
    return (i * o_.batch + b) * problem_.context_width() + head * o_.value_width() + c;
  }
  Bounded Qkv(int64_t i, int64_t b, int64_t head, int part, int64_t c) const {
    return problem_.qkv[At(problem_, i, b, head, part, c)];
  }

  Bounds Context() const {
    Bounds context(problem_.d_context.size());
    ForHeads([&](int64_t b, int64_t head) {
      for (int64_t i = 0; i < o_.seq_length; ++i) {
        const RowBounds row = Row(b, head, i);
        std::vector<test::Sum> sums(o_.value_width());
        for (int64_t j = row.begin; j <= i; ++j) {
          const Bounded dropped = Dropped(row.probability[j - row.begin], b, head, i, j);
          for (int64_t c = 0; c < o_.value_width(); ++c) sums[c].Add(dropped * Qkv(j, b, head, 2, c));
        }
        for (int64_t c = 0; c < o_.value_width(); ++c)
          context[ContextAt(i, b, head, c)] = Stored(sums[c].Total(test::kTensorCoreUnit), precision_);
      }
    });
    return context;
  }

  // From the probabilities that forward has kept. The sinks' gradients go to d_sinks.
  Bounds Gradient(const Owned& probabilities, Bounds* d_sinks) const {
    const int64_t s = o_.seq_length;
    Bounds d_qkv(problem_.qkv.size());
    std::vector<test::Sum> of_groups(problem_.qkv.size()), of_sinks(o_.heads);
    ForHeads([&](int64_t b, int64_t head) {
      std::vector<test::Sum> keys(s * o_.head_size), values(s * o_.value_width());
      for (int64_t i = 0; i < s; ++i) {
        const RowBounds row = Row(b, head, i);
        const Bounds d_scores = ScoreGradients(row, probabilities, b, head, i, &of_sinks[head]);
        std::vector<test::Sum> query(o_.head_size);
        for (int64_t j = row.begin; j <= i; ++j) {
          const Bounded& d = d_scores[j - row.begin];
          const Bounded dropped = Dropped(probabilities[Plane(b, head, i, j)], b, head, i, j);
          for (int64_t c = 0; c < o_.head_size; ++c) {
            query[c].Add(d * Qkv(j, b, head, 1, c));
            keys[j * o_.head_size + c].Add(d * Qkv(i, b, head, 0, c));
          }
          for (int64_t c = 0; c < o_.value_width(); ++c)
            values[j * o_.value_width() + c].Add(dropped * problem_.d_context[ContextAt(i, b, head, c)]);
        }
        for (int64_t c = 0; c < o_.head_size; ++c) d_qkv[At(problem_, i, b, head, 0, c)] = Scaled(query[c]);
      }
      for (int64_t j = 0; j < s; ++j) {
        for (int64_t c = 0; c < o_.head_size; ++c)
          of_groups[At(problem_, j, b, head, 1, c)].Add(Scaled(keys[j * o_.head_size + c]));
        for (int64_t c = 0; c < o_.value_width(); ++c) {
          of_groups[At(problem_, j, b, head, 2, c)].Add(
              Stored(values[j * o_.value_width() + c].Total(test::kTensorCoreUnit), precision_));
        }
      }
    });
    ForHeads([&](int64_t b, int64_t head) {
      for (int64_t j = 0; j < s; ++j) {
        for (const int part : {1, 2}) {
          for (int64_t c = 0; c < (part == 1 ? o_.head_size : o_.value_width()); ++c) {
            const int64_t at = At(problem_, j, b, head, part, c);
            d_qkv[at] = Stored(of_groups[at].Total(), precision_);
          }
        }
      }
    });
    for (const test::Sum& sum : of_sinks) d_sinks->push_back(Stored(sum.Total(), precision_));
    return d_qkv;
  }

 private:
  template <class Body> void ForHeads(const Body& body) const {
    for (int64_t b = 0; b < o_.batch; ++b)
      for (int64_t head = 0; head < o_.heads; ++head) body(b, head);
  }
  Bounded Scaled(const test::Sum& sum) const {
    return Stored(Stored(sum.Total(test::kTensorCoreUnit), precision_) * o_.scale, precision_);
  }
  Bounds ScoreGradients(const RowBounds& row, const Owned& probabilities, int64_t b, int64_t head, int64_t i,
                        test::Sum* of_sink) const {
    Bounds products;
    test::Sum sum;
    for (int64_t j = row.begin; j <= i; ++j) {
      test::Sum dropped;
      for (int64_t c = 0; c < o_.value_width(); ++c)
        dropped.Add(problem_.d_context[ContextAt(i, b, head, c)] * Qkv(j, b, head, 2, c));
      const Bounded d = Keep(Stored(dropped.Total(test::kTensorCoreUnit), precision_), b, head, i, j);
      const Bounded product = probabilities[Plane(b, head, i, j)] * d;
      products.push_back(o_.softmax_in_fp32 ? product : Stored(product, precision_));
      sum.Add(products.back());
    }
    Bounds gradients;
    for (int64_t j = row.begin; j <= i; ++j) {
      const size_t k = j - row.begin;
      Bounded d = Stored(products[k] - probabilities[Plane(b, head, i, j)] * sum.Total(), precision_);
      if (o_.soft_cap > 0) d = Stored(d * (1 - row.capped[k] * row.capped[k]), precision_);
      gradients.push_back(d);
    }
    of_sink->Add(-row.of_sink * sum.Total());
    return gradients;
  }

  const Problem& problem_;
  const AttentionOptions& o_;
  const Kind kind_;
  const DType precision_;
};

void CheckNarrow(const Problem& problem, const Kind& kind, const std::string& variant) {
  AttentionOptions o = problem.options;
  const int64_t s = o.seq_length, b = o.batch;
  const Owned qkv(kind.storage, {s, b, problem.width()}, problem.qkv), context(kind.storage, {s, b, problem.context_width()}),
      mask(DType::kU8, {b, o.heads, s, s}, problem.mask), probabilities(ProbabilityType(o), {b, o.heads, s, s}),
      d_context(kind.storage, {s, b, problem.context_width()}, problem.d_context), d_qkv(kind.storage, {s, b, problem.width()}),
      workspace(DType::kU8, {AttentionWorkspaceBytes(o, kind.storage, omp_get_max_threads())});
  const Owned sinks(kind.storage, {o.heads}, problem.sinks.empty() ? Values(o.heads) : problem.sinks),
      sink_probabilities(DType::kF32, {b, o.heads, s}), d_sinks(DType::kF32, {o.heads});
  if (!problem.sinks.empty()) o.sinks = {sinks, sink_probabilities, d_sinks};
  const Tensor keep = o.dropout > 0 ? mask.tensor() : Tensor();
  AttentionForward({}, qkv, keep, o, probabilities, context, workspace);
  AttentionBackward({}, d_context, qkv, keep, probabilities, o, d_qkv, workspace);
  const NarrowAttention reference(problem, kind);
  Bounds expected_sinks;
  test::ExpectBounded("AttentionForward" + variant, kind, context, reference.Context());
  test::ExpectBounded("AttentionBackward" + variant, kind, d_qkv, reference.Gradient(probabilities, &expected_sinks));
  if (!problem.sinks.empty()) test::ExpectBounded("AttentionBackward's sinks" + variant, kind, d_sinks, expected_sinks);
}

TEST(AttentionTest, NarrowStorageWithinItsBounds) {
  struct Case {
    int64_t s, b, heads, groups, d, value_size;
    double dropout;
    int64_t window = 0;
    float soft_cap = 0.0f;
    bool sinks = false;
  };
  for (const Kind& kind : test::NarrowKinds()) {
    for (const Case& c : {Case{1, 1, 1, 1, 1, 0, 0.0}, Case{7, 3, 3, 3, 5, 0, 0.0}, Case{33, 1, 4, 2, 33, 17, 0.25},
                          Case{65, 1, 2, 1, 64, 0, 0.0}, Case{41, 2, 4, 2, 8, 0, 0.25, 9}, Case{19, 1, 2, 1, 24, 0, 0.0, 0, 1.5f},
                          Case{127, 1, 1, 1, 16, 0, 0.25}, Case{23, 1, 6, 2, 8, 40, 0.25, 6, 0.0f, true}}) {
      for (const bool fp32 : {false, true}) {
        Problem problem = MakeProblem(c.s, c.b, c.heads, c.groups, c.d, c.dropout, kind, c.value_size);
        problem.options.softmax_in_fp32 = fp32;
        problem.options.window = c.window;
        problem.options.soft_cap = c.soft_cap;
        if (c.sinks) problem.sinks = test::RandomValues(c.heads, 7, 1.0, kind.precision);
        CheckNarrow(problem, kind,
                    " of " + std::to_string(c.s) + " tokens, heads of " + std::to_string(c.d) + (fp32 ? ", F32 softmax" : ""));
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
