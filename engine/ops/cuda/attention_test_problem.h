// Attention problems with random values, and their solutions by the CPU twin and in double precision, for the tests of both CUDA
// attentions.
#pragma once

#include <omp.h>

#include <numeric>

#include "engine/ops/attention.h"
#include "engine/ops/cuda/test_device.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge::test {

struct AttentionShape {
  int64_t s, b, heads, groups, d;
  double dropout = 0.0;
  int64_t window = 0;
  bool softmax_in_fp32 = false;
  float soft_cap = 0.0f;
  int64_t value_size = 0;
  bool sinks = false;
};

struct AttentionProblem {
  AttentionProblem(const AttentionShape& shape, DType dtype, uint32_t seed = 1) {
    options = {.seq_length = shape.s,
               .batch = shape.b,
               .heads = shape.heads,
               .groups = shape.groups,
               .head_size = shape.d,
               .value_size = shape.value_size,
               .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.d))),
               .soft_cap = shape.soft_cap,
               .window = shape.window,
               .dropout = shape.dropout,
               .softmax_in_fp32 = shape.softmax_in_fp32,
               .precision = dtype};
    qkv = RandomValues(shape.s * shape.b * width(), seed, 2.0, dtype);
    d_context = RandomValues(shape.s * shape.b * context_width(), seed + 1, 1.0, dtype);
    if (shape.sinks) sinks = RandomValues(shape.heads, seed + 3, 2.0, dtype);
    if (shape.dropout == 0) return;
    keep = RandomValues(shape.b * shape.heads * shape.s * shape.s, seed + 2);
    for (double& x : keep) x = x > -0.5 ? 1 : 0;
  }
  int64_t width() const { return QkvLayout{options.heads, options.groups, options.head_size, options.value_size}.width(); }
  int64_t context_width() const { return options.heads * options.value_width(); }
  Shape QkvShape() const { return {options.seq_length, options.batch, width()}; }
  Shape ContextShape() const { return {options.seq_length, options.batch, context_width()}; }
  Shape ScoreShape() const { return {options.batch, options.heads, options.seq_length, options.seq_length}; }

  Shape RowShape() const { return {options.batch, options.heads, options.seq_length}; }
  Shape SinkShape() const { return {sinks.empty() ? 0 : options.heads}; }

  AttentionOptions options;
  Values qkv, d_context, keep, sinks;
};

struct AttentionResult {
  Values context, d_qkv, d_sinks = {};
};

// On the CPU, in `precision` with the roundings of attention.h.
inline AttentionResult SolveOnCpu(const AttentionProblem& problem, DType precision) {
  const DType dtype = precision == DType::kF16 ? DType::kF32 : precision;  // The CPU twins store F16 values as F32.
  AttentionOptions options = problem.options;
  options.precision = precision;
  const Owned qkv(dtype, problem.QkvShape(), problem.qkv), d_context(dtype, problem.ContextShape(), problem.d_context);
  const Owned context(dtype, problem.ContextShape()), d_qkv(dtype, problem.QkvShape());
  const Owned probabilities(ProbabilityType(options), problem.ScoreShape());
  const Owned keep(DType::kU8, problem.keep.empty() ? Shape{0} : problem.ScoreShape(), problem.keep);
  const Owned workspace(DType::kU8, {AttentionWorkspaceBytes(options, dtype, omp_get_max_threads())});
  const Tensor mask = problem.keep.empty() ? Tensor() : keep.tensor();
  const Owned sinks(dtype, problem.SinkShape(), problem.sinks), d_sinks(DType::kF32, problem.SinkShape());
  const Owned sink_rows(DType::kF32, problem.RowShape());
  if (!problem.sinks.empty()) options.sinks = {sinks, sink_rows, d_sinks};
  AttentionForward.cpu({}, qkv, mask, options, probabilities, context, workspace);
  AttentionBackward.cpu({}, d_context, qkv, mask, probabilities, options, d_qkv, workspace);
  return {context.ToValues(), d_qkv.ToValues(), d_sinks.ToValues()};
}

// One head of one sample in double precision: element (token, channel) of queries, keys, values and gradients by their columns.
class HeadInDouble {
 public:
  HeadInDouble(const AttentionOptions& o, int64_t b, int64_t head, const Values& qkv, const Values& d_context, const Values& keep)
      : o_(o), b_(b), head_(head), qkv_(qkv), d_context_(d_context), keep_(keep) {}

  // Adds to result; returns the gradient of the sink.
  double Solve(const double* sink, AttentionResult* result) const {
    double d_sink = 0;
    for (int64_t i = 0; i < o_.seq_length; ++i) d_sink += SolveQuery(i, sink, result);
    return d_sink;
  }

 private:
  int64_t At(int64_t token, int64_t column) const { return (token * o_.batch + b_) * layout_.width() + column; }
  int64_t ContextAt(int64_t token) const { return ((token * o_.batch + b_) * o_.heads + head_) * o_.value_width(); }
  double Kept(int64_t i, int64_t j) const {
    return keep_.empty() ? 1.0 : keep_[((b_ * o_.heads + head_) * o_.seq_length + i) * o_.seq_length + j] / (1 - o_.dropout);
  }

  double SolveQuery(int64_t i, const double* sink, AttentionResult* result) const {
    const int64_t begin = o_.window > 0 ? std::max<int64_t>(0, i + 1 - o_.window) : 0, d = o_.head_size, v = o_.value_width();
    const double* const query = &qkv_[At(i, query_)];
    const double* const d_out = &d_context_[ContextAt(i)];
    Values p(i + 1), slope(i + 1, o_.scale), d_p(i + 1);
    for (int64_t j = begin; j <= i; ++j) {
      p[j] = o_.scale * std::inner_product(query, query + d, &qkv_[At(j, key_)], 0.0);
      if (o_.soft_cap <= 0) continue;
      const double t = std::tanh(p[j] / o_.soft_cap);
      p[j] = o_.soft_cap * t;
      slope[j] *= 1 - t * t;
    }
    const double top = std::max(*std::max_element(p.begin() + begin, p.end()), sink == nullptr ? -INFINITY : *sink);
    const double of_sink = sink == nullptr ? 0 : std::exp(*sink - top);
    double sum = of_sink, mean = 0;
    for (int64_t j = begin; j <= i; ++j) sum += p[j] = std::exp(p[j] - top);
    for (int64_t j = begin; j <= i; ++j) {
      p[j] /= sum;
      const double kept = Kept(i, j);
      const double* const value = &qkv_[At(j, value_)];
      for (int64_t c = 0; c < v; ++c) {
        result->context[ContextAt(i) + c] += p[j] * kept * value[c];
        result->d_qkv[At(j, value_) + c] += p[j] * kept * d_out[c];
      }
      d_p[j] = kept * std::inner_product(d_out, d_out + v, value, 0.0);
      mean += p[j] * d_p[j];
    }
    for (int64_t j = begin; j <= i; ++j) {
      const double d_score = p[j] * (d_p[j] - mean) * slope[j];
      for (int64_t c = 0; c < d; ++c) {
        result->d_qkv[At(i, query_) + c] += d_score * qkv_[At(j, key_) + c];
        result->d_qkv[At(j, key_) + c] += d_score * query[c];
      }
    }
    return -of_sink / sum * mean;
  }

  const AttentionOptions& o_;
  const int64_t b_, head_;
  const Values &qkv_, &d_context_, &keep_;
  const QkvLayout layout_{o_.heads, o_.groups, o_.head_size, o_.value_size};
  const int64_t query_ = layout_.query_column(head_), key_ = layout_.key_column(head_ / layout_.heads_per_group()),
                value_ = layout_.value_column(head_ / layout_.heads_per_group());
};

// Without any rounding. keep [b, heads, s, s] and sinks [heads] may be empty.
inline AttentionResult SolveInDouble(const AttentionOptions& options, const Values& qkv, const Values& d_context,
                                     const Values& keep = {}, const Values& sinks = {}) {
  AttentionResult result{Values(d_context.size()), Values(qkv.size()), Values(sinks.size())};
  for (int64_t b = 0; b < options.batch; ++b) {
    for (int64_t head = 0; head < options.heads; ++head) {
      const double d_sink =
          HeadInDouble(options, b, head, qkv, d_context, keep).Solve(sinks.empty() ? nullptr : &sinks[head], &result);
      if (!sinks.empty()) result.d_sinks[head] += d_sink;
    }
  }
  return result;
}
inline AttentionResult SolveInDouble(const AttentionProblem& problem) {
  return SolveInDouble(problem.options, problem.qkv, problem.d_context, problem.keep, problem.sinks);
}

// |actual - expected| / |expected|; NaN where anything is NaN.
inline double RelativeError(const Values& actual, const Values& expected) {
  if (actual.size() != expected.size()) return NAN;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// The columns of queries (part 0), keys (1) or values (2) of a gradient laid out as qkv, so that none hides behind a larger one.
inline Values PartOf(const AttentionProblem& problem, const Values& qkv, int part) {
  const AttentionOptions& o = problem.options;
  const int64_t per_group = o.heads / o.groups, width = problem.width();
  Values values;
  const int64_t group_width = (per_group + 1) * o.head_size + o.value_width();
  for (size_t i = 0; i < qkv.size(); ++i) {
    const int64_t slot = static_cast<int64_t>(i) % width % group_width / o.head_size;
    if (std::min<int64_t>(std::max<int64_t>(slot - per_group + 1, 0), 2) == part) values.push_back(qkv[i]);
  }
  return values;
}

inline void ExpectClose(const AttentionProblem& problem, const AttentionResult& actual, const AttentionResult& expected,
                        double tolerance) {
  EXPECT_LT(RelativeError(actual.context, expected.context), tolerance) << "context";
  for (int part = 0; part < 3; ++part) {
    EXPECT_LT(RelativeError(PartOf(problem, actual.d_qkv, part), PartOf(problem, expected.d_qkv, part)), tolerance)
        << "gradient of " << std::array{"queries", "keys", "values"}[part];
  }
  if (problem.sinks.empty()) return;
  EXPECT_LT(RelativeError(actual.d_sinks, expected.d_sinks), 2 * tolerance) << "gradient of sinks";
}

}  // namespace mbridge::test
