#include "engine/ops/sigmoid_gate.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

double Open(double x) { return 1 / (1 + std::exp(-x)); }

TEST(SigmoidGateTest, ForwardAndBackward) {
  constexpr int64_t kCount = 131;
  for (const Kind& kind : test::kKinds) {
    const Values x = test::RandomValues(kCount, 1, 2.0, kind.precision),
                 gate = test::RandomValues(kCount, 2, 4.0, kind.precision),
                 d = test::RandomValues(kCount, 3, 1.0, kind.precision);
    const auto owned = [&](const Values& values) { return Owned(kind.storage, {kCount}, values); };
    const Owned y = owned(Values(kCount)), dx = owned(d), d_gate = owned(gate);
    SigmoidGateForward({}, owned(x), owned(gate), kind.precision, y);
    Values expected(kCount), expected_dx(kCount), expected_gate(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      expected[i] = x[i] * Open(gate[i]);
      expected_dx[i] = d[i] * Open(gate[i]);
      expected_gate[i] = d[i] * x[i] * Open(gate[i]) * (1 - Open(gate[i]));
    }
    test::ExpectNear(y.ToValues(), expected, 2 * kind.epsilon(), 1e-7);
    SigmoidGateBackward({}, dx, owned(x), d_gate, kind.precision, dx, d_gate);  // In place.
    test::ExpectNear(dx.ToValues(), expected_dx, 2 * kind.epsilon(), 1e-7);
    // 1 - open is as far from its true value as open, which is rounded.
    test::ExpectNear(d_gate.ToValues(), expected_gate, 3 * kind.epsilon(), kind.epsilon());
  }
}

TEST(SigmoidGateTest, RefusesOtherSizes) {
  const Owned x(DType::kF32, {4}), gate(DType::kF32, {3});
  EXPECT_THROW(SigmoidGateForward({}, x, gate, DType::kF32, x), EngineError);
}

TEST(SigmoidGateTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const int64_t count : {1, 7, 33, 2047}) {
      const Values x = test::RandomValues(count, 1, 2.0, kind.precision),
                   gate = test::RandomValues(count, 2, 4.0, kind.precision),
                   dy = test::RandomValues(count, 3, 1.0, kind.precision);
      const auto owned = [&](const Values& values) { return Owned(kind.storage, {count}, values); };
      const Owned y(kind.storage, {count}), dx(kind.storage, {count}), d_gate(kind.storage, {count});
      SigmoidGateForward({}, owned(x), owned(gate), kind.precision, y);
      SigmoidGateBackward({}, owned(dy), owned(x), owned(gate), kind.precision, dx, d_gate);
      Bounds expected_y, expected_dx, expected_gate;
      for (int64_t i = 0; i < count; ++i) {
        const Bounded open = Stored(test::Sigmoid(gate[i]), kind.precision),
                      product = Stored(Bounded(dy[i]) * x[i], kind.precision);
        expected_y.push_back(Stored(x[i] * open, kind.precision));
        expected_dx.push_back(Stored(dy[i] * open, kind.precision));
        expected_gate.push_back(Stored(product * open * (1 - open), kind.precision));
      }
      test::ExpectBounded("SigmoidGateForward", kind, y, expected_y);
      test::ExpectBounded("SigmoidGateBackward's dx", kind, dx, expected_dx);
      test::ExpectBounded("SigmoidGateBackward's d_gate", kind, d_gate, expected_gate);
    }
  }
}

}  // namespace
}  // namespace mbridge
