#include "engine/ops/swiglu.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 7, kWidth = 19;  // Of y.

double Silu(double u) { return u / (1 + std::exp(-u)); }

// Without roundings, except that of the sum if it is told.
Values Reference(const Values& x, const Values& bias, DType sum_precision) {
  Values y(kRows * kWidth);
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    const int64_t row = i / kWidth, j = i % kWidth;
    double gate = x[row * 2 * kWidth + j], linear = x[row * 2 * kWidth + kWidth + j];
    if (!bias.empty()) {
      gate = test::RoundTo(sum_precision, gate + bias[j]);
      linear = test::RoundTo(sum_precision, linear + bias[kWidth + j]);
    }
    y[i] = Silu(gate) * linear;
  }
  return y;
}

TEST(SwiGluTest, ForwardWithBias) {
  for (const Kind& kind : test::kKinds) {
    for (SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
      const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0, kind.precision),
                   bias = test::RandomValues(2 * kWidth, 2, 1.0, kind.precision);
      const Owned y(kind.storage, {kRows, kWidth});
      SwiGluForward({}, Owned(kind.storage, {kRows, 2 * kWidth}, x), Owned(kind.storage, {2 * kWidth}, bias), glu, kind.precision,
                    y);
      const DType sum = glu == SwiGluKind::kEager ? kind.precision : DType::kF64;
      test::ExpectNear(y.ToValues(), Reference(x, bias, sum), (glu == SwiGluKind::kEager ? 2 : 1) * kind.epsilon(), 2e-6);
      for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
    }
  }
}

TEST(SwiGluTest, BackwardAgainstFiniteDifferences) {
  for (const Kind& kind : test::kKinds) {
    for (SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
      for (bool with_bias : {false, true}) {
        const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0, kind.precision);
        const Values bias = with_bias ? test::RandomValues(2 * kWidth, 2, 1.0, kind.precision) : Values();
        const Values dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
        const Owned bias_data(kind.storage, {2 * kWidth}, with_bias ? bias : Values(2 * kWidth)),
            dx(kind.storage, {kRows, 2 * kWidth});
        SwiGluBackward({}, Owned(kind.storage, {kRows, kWidth}, dy), Owned(kind.storage, {kRows, 2 * kWidth}, x),
                       with_bias ? bias_data.tensor() : Tensor(), glu, kind.precision, dx);
        const Values slope =
            test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, bias, DType::kF64), dy); });
        // The eager kind rounds sum, silu and product before.
        const double steps = glu == SwiGluKind::kEager ? 3 : 1;
        const double absolute = glu == SwiGluKind::kEager && with_bias ? 8 * kind.epsilon() : 3e-6;
        test::ExpectNear(dx.ToValues(), slope, steps * kind.epsilon(), absolute);
      }
    }
  }
}

TEST(SwiGluTest, NarrowStorageHasTheSameBits) {
  if (test::g_on_device) GTEST_SKIP() << "SKIPPED: compares bits of the CPU twin with bits of the device";
  const Values x = test::RandomValues(kRows * 2 * kWidth, 1, 4.0);
  for (SwiGluKind glu : {SwiGluKind::kFused, SwiGluKind::kEager}) {
    Values results[2];
    for (int i = 0; i < 2; ++i) {
      const DType storage = i == 0 ? DType::kF32 : DType::kBF16;
      const Owned y(storage, {kRows, kWidth});
      SwiGluForward({}, Owned(storage, {kRows, 2 * kWidth}, x), {}, glu, DType::kBF16, y);
      results[i] = y.ToValues();
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST(SwiGluTest, RefusesWidthsThatDoNotFit) {
  const Owned x(DType::kF32, {kRows, kWidth}), y(DType::kF32, {kRows, kWidth});
  EXPECT_THROW(SwiGluForward({}, x, {}, SwiGluKind::kFused, DType::kF32, y), EngineError);
}

}  // namespace
}  // namespace mbridge
