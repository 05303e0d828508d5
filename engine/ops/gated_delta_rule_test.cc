#include "engine/ops/gated_delta_rule.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr DeltaLayout kLayout{.key_heads = 2, .value_heads = 4, .key_size = 3, .value_size = 5};

struct Inputs {
  Values qkv, log_decay, beta;
};

// The recurrence as the header says it, in double precision.
Values Reference(const Inputs& in, int64_t s, int64_t b) {
  const DeltaLayout& o = kLayout;
  Values out(s * b * o.value_width());
  for (int64_t sequence = 0; sequence < b; ++sequence) {
    for (int64_t head = 0; head < o.value_heads; ++head) {
      const int64_t key_head = head / o.values_per_key();
      Values state(o.key_size * o.value_size);
      for (int64_t t = 0; t < s; ++t) {
        const int64_t row = t * b + sequence;
        const double* x = &in.qkv[row * o.width()];
        Values k(x + o.key_column(key_head), x + o.key_column(key_head) + o.key_size);
        Values q(x + o.query_column(key_head), x + o.query_column(key_head) + o.key_size);
        const double k_length = std::sqrt(test::Dot(k, k) + 1e-6), q_length = std::sqrt(test::Dot(q, q) + 1e-6);
        for (int64_t i = 0; i < o.key_size; ++i) {
          k[i] /= k_length;
          q[i] /= q_length * std::sqrt(static_cast<double>(o.key_size));
        }
        for (double& element : state) element *= std::exp(in.log_decay[row * o.value_heads + head]);
        for (int64_t j = 0; j < o.value_size; ++j) {
          double recalled = 0, read = 0;
          for (int64_t i = 0; i < o.key_size; ++i) recalled += state[i * o.value_size + j] * k[i];
          const double step = in.beta[row * o.value_heads + head] * (x[o.value_column(head) + j] - recalled);
          for (int64_t i = 0; i < o.key_size; ++i) {
            state[i * o.value_size + j] += k[i] * step;
            read += state[i * o.value_size + j] * q[i];
          }
          out[row * o.value_width() + head * o.value_size + j] = read;
        }
      }
    }
  }
  return out;
}

Inputs RandomInputs(int64_t rows, DType precision) {
  Inputs in{test::RandomValues(rows * kLayout.width(), 1, 1.0, precision),
            test::RandomValues(rows * kLayout.value_heads, 2, 1.0, DType::kF32),
            test::RandomValues(rows * kLayout.value_heads, 3, 0.5, DType::kF32)};
  for (double& g : in.log_decay) g = test::RoundTo(DType::kF32, -std::fabs(g));
  for (double& beta : in.beta) beta = test::RoundTo(DType::kF32, beta + 0.5);
  return in;
}

struct Outputs {
  Values output, d_qkv, d_log_decay, d_beta;
};

Outputs RunBoth(const Inputs& in, const Values& d_output, int64_t s, int64_t b, const Kind& kind) {
  const DeltaLayout& o = kLayout;
  const Owned qkv(kind.storage, {s, b, o.width()}, in.qkv), decay(DType::kF32, {s, b, o.value_heads}, in.log_decay),
      beta(DType::kF32, {s, b, o.value_heads}, in.beta), output(kind.storage, {s, b, o.value_width()}),
      d(kind.storage, {s, b, o.value_width()}, d_output), d_qkv(kind.storage, {s, b, o.width()}),
      d_decay(DType::kF32, {s, b, o.value_heads}), d_beta(DType::kF32, {s, b, o.value_heads}),
      states(DType::kF32, {b, o.value_heads, DeltaChunks(s), o.key_size * o.value_size});
  GatedDeltaRuleForward({}, qkv, decay, beta, o, kind.precision, output, states);
  GatedDeltaRuleBackward({}, d, qkv, decay, beta, states, o, kind.precision, d_qkv, d_decay, d_beta);
  const Owned again(kind.storage, {s, b, o.value_width()});
  GatedDeltaRuleForward({}, qkv, decay, beta, o, kind.precision, again, {});
  EXPECT_EQ(again.ToValues(), output.ToValues()) << "kept states change nothing";
  return {output.ToValues(), d_qkv.ToValues(), d_decay.ToValues(), d_beta.ToValues()};
}

TEST(GatedDeltaRuleTest, ForwardAndBackward) {
  constexpr int64_t kSteps = 6, kBatch = 2;
  for (const Kind& kind : test::kKinds) {
    const Inputs in = RandomInputs(kSteps * kBatch, kind.precision);
    const Values d = test::RandomValues(kSteps * kBatch * kLayout.value_width(), 4, 1.0, kind.precision);
    const Outputs out = RunBoth(in, d, kSteps, kBatch, kind);
    test::ExpectNear(out.output, Reference(in, kSteps, kBatch), 2 * kind.epsilon(), 2 * kind.epsilon());
    const auto slope = [&](Values Inputs::*moved) {
      return test::NumericGradient(in.*moved, [&](const Values& values) {
        Inputs other = in;
        other.*moved = values;
        return test::Dot(Reference(other, kSteps, kBatch), d);
      });
    };
    test::ExpectNear(out.d_qkv, slope(&Inputs::qkv), 4 * kind.epsilon(), 4 * kind.epsilon());
    test::ExpectNear(out.d_log_decay, slope(&Inputs::log_decay), 1e-5, 1e-5);
    test::ExpectNear(out.d_beta, slope(&Inputs::beta), 1e-5, 1e-5);
  }
}

// Longer than a chunk, and not a multiple of one: the gradient at the first tokens has come through kept states.
TEST(GatedDeltaRuleTest, SeveralChunks) {
  constexpr int64_t kSteps = 2 * kDeltaChunk + 3;
  Inputs in = RandomInputs(kSteps, DType::kF32);
  for (double& g : in.log_decay) g *= 0.02;  // The first tokens are not forgotten.
  const Values d = test::RandomValues(kSteps * kLayout.value_width(), 4, 1.0, DType::kF32);
  const Outputs out = RunBoth(in, d, kSteps, 1, test::kKinds[0]);
  test::ExpectNear(out.output, Reference(in, kSteps, 1), 1e-5, 1e-5);
  for (const int64_t place : {0, 7, 10, 31}) {
    for (const auto& [moved, actual] : {std::pair(&Inputs::qkv, &out.d_qkv), std::pair(&Inputs::log_decay, &out.d_log_decay),
                                        std::pair(&Inputs::beta, &out.d_beta)}) {
      const double slope = test::NumericGradient({(in.*moved)[place]}, [&, moved = moved](const Values& value) {
        Inputs other = in;
        (other.*moved)[place] = value[0];
        return test::Dot(Reference(other, kSteps, 1), d);
      })[0];
      EXPECT_NEAR((*actual)[place], slope, 2e-5 * (1 + std::fabs(slope))) << place;
    }
  }
}

TEST(GatedDeltaRuleTest, Gates) {
  constexpr int64_t kRows = 6, kHeads = 3, kColumn = 2, kWidth = kColumn + 2 * kHeads + 1;
  for (const Kind& kind : test::kKinds) {
    const Values projected = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision),
                 a_log = test::RandomValues(kHeads, 2, 1.0, kind.precision),
                 dt_bias = test::RandomValues(kHeads, 3, 1.0, kind.precision), d_g = test::RandomValues(kRows * kHeads, 4),
                 d_beta = test::RandomValues(kRows * kHeads, 5);
    const auto value_of = [&](const Values& x, const Values& log, const Values& bias, Values* g, Values* beta) {
      for (int64_t i = 0; i < kRows * kHeads; ++i) {
        const double* in = &x[i / kHeads * kWidth + kColumn + i % kHeads];
        beta->push_back(1 / (1 + std::exp(-in[0])));
        g->push_back(-std::exp(log[i % kHeads]) * std::log1p(std::exp(in[kHeads] + bias[i % kHeads])));
      }
    };
    const auto loss = [&](const Values& x, const Values& log, const Values& bias) {
      Values g, beta;
      value_of(x, log, bias, &g, &beta);
      return test::Dot(g, d_g) + test::Dot(beta, d_beta);
    };
    const Owned x(kind.storage, {kRows, 1, kWidth}, projected), log(kind.storage, {kHeads}, a_log),
        bias(kind.storage, {kHeads}, dt_bias), g(DType::kF32, {kRows, kHeads}), beta(DType::kF32, {kRows, kHeads}),
        dx(kind.storage, {kRows, 1, kWidth}), d_log(DType::kF32, {kHeads}, {1, 1, 1}), d_bias(DType::kF32, {kHeads}, {1, 1, 1});
    DeltaGatesForward({}, x, kColumn, log, bias, kind.precision, g, beta);
    Values expected_g, expected_beta;
    value_of(projected, a_log, dt_bias, &expected_g, &expected_beta);
    test::ExpectNear(g.ToValues(), expected_g, 1e-5, 1e-6);
    test::ExpectNear(beta.ToValues(), expected_beta, kind.epsilon(), 1e-6);

    DeltaGatesBackward({}, Owned(DType::kF32, {kRows, kHeads}, d_g), Owned(DType::kF32, {kRows, kHeads}, d_beta), x, kColumn, log,
                       bias, kind.precision, dx, d_log, d_bias);
    test::ExpectNear(dx.ToValues(), test::NumericGradient(projected, [&](const Values& v) { return loss(v, a_log, dt_bias); }),
                     2 * kind.epsilon(), 2 * kind.epsilon());
    const auto joined = [](Values slope) {  // What was there before stays.
      for (double& element : slope) element += 1;
      return slope;
    };
    test::ExpectNear(d_log.ToValues(),
                     joined(test::NumericGradient(a_log, [&](const Values& v) { return loss(projected, v, dt_bias); })),
                     2 * kind.epsilon(), 2 * kind.epsilon());
    test::ExpectNear(d_bias.ToValues(),
                     joined(test::NumericGradient(dt_bias, [&](const Values& v) { return loss(projected, a_log, v); })),
                     2 * kind.epsilon(), 2 * kind.epsilon());
  }
}

TEST(GatedDeltaRuleTest, RefusesOtherShapes) {
  const Owned qkv(DType::kF32, {2, 1, kLayout.width() + 1}), gates(DType::kF32, {2, 1, kLayout.value_heads}),
      output(DType::kF32, {2, 1, kLayout.value_width()});
  EXPECT_THROW(GatedDeltaRuleForward({}, qkv, gates, gates, kLayout, DType::kF32, output, {}), EngineError);
  EXPECT_THROW(DeltaGatesForward({}, qkv, kLayout.width(), gates, gates, DType::kF32, gates, gates), EngineError);
}

}  // namespace
}  // namespace mbridge
