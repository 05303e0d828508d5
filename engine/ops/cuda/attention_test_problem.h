// Attention problems with random values, and their solution by the CPU twin, for the tests of both CUDA attentions.
#pragma once

#include <omp.h>

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

// On the CPU, in `precision` with the roundings of attention.h; F32 stands for the exact result.
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
