#include "engine/ops/sigmoid_gate.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

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

}  // namespace
}  // namespace mbridge
