#include "engine/ops/causal_conv1d.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kLength = 6, kBatch = 2, kChannels = 67, kTaps = 4, kWide = 71, kFirst = 3;  // Windows of wider rows.

double Silu(double u) { return u / (1 + std::exp(-u)); }

// x [length * batch, kWide]; only the window counts.
Values Reference(const Values& x, const Values& weight, const Values& bias) {
  Values y(kLength * kBatch * kChannels);
  for (int64_t row = 0; row < kLength * kBatch; ++row) {
    for (int64_t j = 0; j < kChannels; ++j) {
      double u = bias.empty() ? 0 : bias[j];
      for (int64_t i = 0; i < kTaps; ++i) {
        const int64_t from = row - (kTaps - 1 - i) * kBatch;
        if (from >= 0) u += weight[j * kTaps + i] * x[from * kWide + kFirst + j];
      }
      y[row * kChannels + j] = Silu(u);
    }
  }
  return y;
}

TEST(CausalConv1dTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (bool with_bias : {false, true}) {
      const int64_t rows = kLength * kBatch;
      const Values x = test::RandomValues(rows * kWide, 1, 2.0, kind.precision),
                   weight = test::RandomValues(kChannels * kTaps, 2, 1.0, kind.precision),
                   bias = with_bias ? test::RandomValues(kChannels, 3, 1.0, kind.precision) : Values(),
                   dy = test::RandomValues(rows * kChannels, 4, 1.0, kind.precision);
      const Owned x_data(kind.storage, {kLength, kBatch, kWide}, x), w(kind.storage, {kChannels, 1, kTaps}, weight);
      const Owned b(kind.storage, {kChannels}, with_bias ? bias : Values(kChannels)), g(kind.storage, {rows, kChannels}, dy);
      const Owned y(kind.storage, {rows, kChannels}), dx(kind.storage, {rows, kWide});
      const Owned weight_grad(DType::kF32, {kChannels, 1, kTaps}, Values(kChannels * kTaps, 1.0)),
          bias_grad(DType::kF32, {kChannels});
      const Tensor added = with_bias ? b.tensor() : Tensor(), added_grad = with_bias ? bias_grad.tensor() : Tensor();
      const Matrix window = ColumnsOf(AsMatrix(x_data), kFirst, kChannels);
      CausalConv1dForward({}, window, w, added, kBatch, kind.precision, AsMatrix(y));
      const double eps = kind.epsilon();
      test::ExpectNear(y.ToValues(), Reference(x, weight, bias), eps, 4e-6);
      CausalConv1dBackward({}, AsMatrix(g), window, w, added, kBatch, kind.precision, ColumnsOf(AsMatrix(dx), kFirst, kChannels),
                           weight_grad, added_grad);
      const auto loss = [&](const Values& xs, const Values& ws, const Values& bs) {
        return test::Dot(Reference(xs, ws, bs), dy);
      };
      test::ExpectNear(dx.ToValues(), test::NumericGradient(x, [&](const Values& v) { return loss(v, weight, bias); }), eps,
                       1e-5);
      Values slope = test::NumericGradient(weight, [&](const Values& v) { return loss(x, v, bias); });
      for (double& value : slope) value += 1;  // What stood there.
      test::ExpectNear(weight_grad.ToValues(), slope, eps, 1e-5 + 2 * eps);
      if (with_bias) {
        slope = test::NumericGradient(bias, [&](const Values& v) { return loss(x, weight, v); });
        test::ExpectNear(bias_grad.ToValues(), slope, eps, 1e-5);
      }
    }
  }
}

TEST(CausalConv1dTest, RefusesOtherShapes) {
  const Owned x(DType::kF32, {6, 4}), y(DType::kF32, {6, 4}), w(DType::kF32, {3, 1, 4});
  EXPECT_THROW(CausalConv1dForward({}, AsMatrix(x), w, {}, 2, DType::kF32, AsMatrix(y)), EngineError);
}

void CheckNarrow(const Kind& kind, int64_t length, int64_t batch, int64_t channels, int64_t taps) {
  const int64_t rows = length * batch;
  const Values x = test::RandomValues(rows * channels, 1, 2.0, kind.precision),
               weight = test::RandomValues(channels * taps, 2, 1.0, kind.precision),
               bias = test::RandomValues(channels, 3, 1.0, kind.precision),
               dy = test::RandomValues(rows * channels, 4, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, channels}, x), w(kind.storage, {channels, taps}, weight),
      b(kind.storage, {channels}, bias), g(kind.storage, {rows, channels}, dy), y(kind.storage, {rows, channels}),
      dx(kind.storage, {rows, channels}), weight_grad(DType::kF32, {channels, taps}), bias_grad(DType::kF32, {channels});
  CausalConv1dForward({}, AsMatrix(x_data), w, b, batch, kind.precision, AsMatrix(y));
  CausalConv1dBackward({}, AsMatrix(g), AsMatrix(x_data), w, b, batch, kind.precision, AsMatrix(dx), weight_grad, bias_grad);
  Bounds expected_y, expected_dx, expected_weight, expected_bias;
  std::vector<test::Sum> dx_sums(rows * channels), weight_sums(channels * taps), bias_sums(channels);
  for (int64_t at = 0; at < rows * channels; ++at) {
    const int64_t row = at / channels, j = at % channels;
    const auto from = [&](int64_t i) { return row - (taps - 1 - i) * batch; };
    test::Sum sum;
    sum.Add(bias[j]);
    for (int64_t i = 0; i < taps; ++i) {
      if (from(i) >= 0) sum.Add(Bounded(weight[j * taps + i]) * x[from(i) * channels + j]);
    }
    const Bounded u = sum.Total(), s = Sigmoid(u), du = dy[at] * s * (1 + u * (1 - s));
    expected_y.push_back(Stored(u * s, kind.precision));
    bias_sums[j].Add(du);
    for (int64_t i = 0; i < taps; ++i) {
      if (from(i) < 0) continue;
      dx_sums[from(i) * channels + j].Add(weight[j * taps + i] * du);
      weight_sums[j * taps + i].Add(du * x[from(i) * channels + j]);
    }
  }
  for (const test::Sum& sum : dx_sums) expected_dx.push_back(Stored(sum.Total(), kind.precision));
  for (const test::Sum& sum : weight_sums) expected_weight.push_back(Stored(sum.Total(), kind.precision));
  for (const test::Sum& sum : bias_sums) expected_bias.push_back(Stored(sum.Total(), kind.precision));
  test::ExpectBounded("CausalConv1dForward", kind, y, expected_y);
  test::ExpectBounded("CausalConv1dBackward's dx", kind, dx, expected_dx);
  test::ExpectBounded("CausalConv1dBackward's weight_grad", kind, weight_grad, expected_weight);
  test::ExpectBounded("CausalConv1dBackward's bias_grad", kind, bias_grad, expected_bias);
}

TEST(CausalConv1dTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const int64_t channels : {1, 7, 33, 129}) {
      for (const int64_t taps : {1, 4, 9}) CheckNarrow(kind, 5, 3, channels, taps);
    }
  }
}

}  // namespace
}  // namespace mbridge
