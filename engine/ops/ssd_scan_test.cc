#include "engine/ops/ssd_scan.h"

#include <omp.h>

#include <algorithm>

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kLength = 7, kBatch = 2, kRows = kLength * kBatch;

SsdScanOptions Options(DType precision, float dt_min, float dt_max) {
  return {.batch = kBatch,
          .heads = 4,
          .head_dim = 3,
          .groups = 2,
          .state_dim = 5,
          .dt_min = dt_min,
          .dt_max = dt_max,
          .precision = precision};
}

struct Inputs {
  Values xbc, dt, a_log, d, dt_bias;
};

Inputs RandomInputs(const SsdScanOptions& o) {
  return {test::RandomValues(kRows * o.width(), 1, 1.0, o.precision), test::RandomValues(kRows * o.heads, 2, 2.0, o.precision),
          test::RandomValues(o.heads, 3, 1.0, o.precision), test::RandomValues(o.heads, 4, 1.0, o.precision),
          test::RandomValues(o.heads, 5, 1.0, o.precision)};
}

Values Reference(const Inputs& in, const SsdScanOptions& o) {
  Values y(kRows * o.inner_width());
  for (int64_t i = 0; i < kBatch * o.heads; ++i) {
    const int64_t sequence = i / o.heads, head = i % o.heads, group = head / (o.heads / o.groups);
    Values state(o.head_dim * o.state_dim);
    for (int64_t t = 0; t < kLength; ++t) {
      const int64_t row = t * kBatch + sequence;
      const double* x = &in.xbc[row * o.width() + head * o.head_dim];
      const double* b = &in.xbc[row * o.width() + o.inner_width() + group * o.state_dim];
      const double* c = b + o.groups * o.state_dim;
      double delta = std::max<double>(std::log1p(std::exp(in.dt[row * o.heads + head] + in.dt_bias[head])), o.dt_min);
      if (o.dt_max > 0) delta = std::min<double>(delta, o.dt_max);
      const double decay = std::exp(-std::exp(in.a_log[head]) * delta);
      for (int64_t p = 0; p < o.head_dim; ++p) {
        double sum = in.d[head] * x[p];
        for (int64_t n = 0; n < o.state_dim; ++n) {
          double& h = state[p * o.state_dim + n];
          h = decay * h + delta * x[p] * b[n];
          sum += h * c[n];
        }
        y[row * o.inner_width() + head * o.head_dim + p] = sum;
      }
    }
  }
  return y;
}

void Check(const Kind& kind, const SsdScanOptions& o) {
  const Inputs in = RandomInputs(o);
  const Values dy = test::RandomValues(kRows * o.inner_width(), 6, 1.0, kind.precision);
  const Owned xbc(kind.storage, {kRows, o.width()}, in.xbc), dt(kind.storage, {kRows, o.heads}, in.dt),
      a_log(kind.storage, {o.heads}, in.a_log), d(kind.storage, {o.heads}, in.d), bias(kind.storage, {o.heads}, in.dt_bias),
      g(kind.storage, {kRows, o.inner_width()}, dy), y(kind.storage, {kRows, o.inner_width()}),
      d_xbc(kind.storage, {kRows, o.width()}), d_dt(kind.storage, {kRows, o.heads}), a_log_grad(DType::kF32, {o.heads}),
      d_grad(DType::kF32, {o.heads}), bias_grad(DType::kF32, {o.heads}),
      workspace(DType::kU8, {SsdScanWorkspaceBytes(o, kLength, omp_get_max_threads())});
  const SsdScanInputs inputs{AsMatrix(xbc), AsMatrix(dt), a_log, d, bias};
  const double eps = kind.epsilon();
  SsdScanForward({}, inputs, o, y, workspace);
  test::ExpectNear(y.ToValues(), Reference(in, o), eps, 1e-5);
  SsdScanBackward({}, g, inputs, o, AsMatrix(d_xbc), AsMatrix(d_dt), {a_log_grad, d_grad, bias_grad}, workspace);
  const auto slope = [&](Values Inputs::*part) {
    return test::NumericGradient(in.*part, [&](const Values& v) {
      Inputs changed = in;
      changed.*part = v;
      return test::Dot(Reference(changed, o), dy);
    });
  };
  test::ExpectNear(d_xbc.ToValues(), slope(&Inputs::xbc), eps, 3e-5);
  test::ExpectNear(d_dt.ToValues(), slope(&Inputs::dt), eps, 3e-5);
  test::ExpectNear(a_log_grad.ToValues(), slope(&Inputs::a_log), eps, 3e-5);
  test::ExpectNear(d_grad.ToValues(), slope(&Inputs::d), eps, 3e-5);
  test::ExpectNear(bias_grad.ToValues(), slope(&Inputs::dt_bias), eps, 3e-5);
}

TEST(SsdScanTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) Check(kind, Options(kind.precision, 0, 0));
}

TEST(SsdScanTest, BoundsOfTheTimeStep) { Check(test::kKinds[0], Options(DType::kF32, 0.3f, 1.1f)); }

// A thread for each head of a group, and more threads than heads.
TEST(SsdScanTest, AnyNumberOfThreads) {
  const int threads = omp_get_max_threads();
  for (const int count : {1, 2, 5}) {
    omp_set_num_threads(count);
    Check(test::kKinds[0], Options(DType::kF32, 0, 0));
  }
  omp_set_num_threads(threads);
}

TEST(SsdScanTest, RefusesASmallWorkspace) {
  const SsdScanOptions o = Options(DType::kF32, 0, 0);
  const Owned xbc(DType::kF32, {kRows, o.width()}), dt(DType::kF32, {kRows, o.heads}), head(DType::kF32, {o.heads}),
      y(DType::kF32, {kRows, o.inner_width()}), workspace(DType::kU8, {16});
  EXPECT_THROW(SsdScanForward({}, {AsMatrix(xbc), AsMatrix(dt), head, head, head}, o, y, workspace), EngineError);
}

}  // namespace
}  // namespace mbridge
