#include "engine/ops/gated_rms_norm.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 4, kWidth = 12, kWide = 17, kFirst = 2;
constexpr double kEpsilon = 1e-2;

double Silu(double z) { return z / (1 + std::exp(-z)); }

// z [rows, kWide]; only the window counts.
Values Reference(const Values& x, const Values& z, const Values& gamma, int64_t groups, bool norm_first) {
  const int64_t n = kWidth / groups;
  Values y(x.size());
  for (int64_t i = 0; i < kRows * groups; ++i) {
    const int64_t row = i / groups, begin = i % groups * n;
    const auto gate = [&](int64_t j) { return Silu(z[row * kWide + kFirst + begin + j]); };
    double squares = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double u = x[row * kWidth + begin + j] * (norm_first ? 1 : gate(j));
      squares += u * u / static_cast<double>(n);
    }
    for (int64_t j = 0; j < n; ++j) {
      const double g = gamma.empty() ? 1 : gamma[(begin + j) % gamma.size()] / std::sqrt(squares + kEpsilon);
      y[row * kWidth + begin + j] = x[row * kWidth + begin + j] * gate(j) * g;
    }
  }
  return y;
}

struct Case {
  int64_t groups, gammas;
  bool norm_first;
};

TEST(GatedRmsNormTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (const Case& c : {Case{1, kWidth, false},
                          {3, kWidth, false},
                          {3, kWidth, true},
                          {3, kWidth / 3, true},
                          {3, kWidth / 3, false},
                          {1, 0, false}}) {
      const Values x = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision),
                   z = test::RandomValues(kRows * kWide, 2, 2.0, kind.precision),
                   gamma = test::RandomValues(c.gammas, 3, 1.0, kind.precision),
                   dy = test::RandomValues(kRows * kWidth, 4, 1.0, kind.precision);
      const Owned x_data(kind.storage, {kRows, kWidth}, x), z_data(kind.storage, {kRows, kWide}, z);
      const Owned g(kind.storage, {std::max<int64_t>(c.gammas, 1)}, c.gammas > 0 ? gamma : Values(1)),
          rstd(DType::kF32, {kRows, c.groups});
      const Owned y(kind.storage, {kRows, kWidth}), dx(kind.storage, {kRows, kWidth}, dy), dz(kind.storage, {kRows, kWide});
      const Owned gamma_grad(DType::kF32, {std::max<int64_t>(c.gammas, 1)});
      const GatedRmsNormOptions options{
          .groups = c.groups, .norm_before_gate = c.norm_first, .norm = {.epsilon = kEpsilon, .precision = kind.precision}};
      const Matrix window = ColumnsOf(AsMatrix(z_data), kFirst, kWidth);
      const Tensor weights = c.gammas > 0 ? g.tensor() : Tensor();
      const double eps = kind.epsilon();
      GatedRmsNormForward({}, x_data, window, weights, options, y, rstd);
      test::ExpectNear(y.ToValues(), Reference(x, z, gamma, c.groups, c.norm_first), eps, 3e-6);
      GatedRmsNormBackward({}, dx, x_data, window, weights, rstd, options, dx, ColumnsOf(AsMatrix(dz), kFirst, kWidth),
                           c.gammas > 0 ? gamma_grad.tensor() : Tensor());
      const auto loss = [&](const Values& xs, const Values& zs, const Values& gs) {
        return test::Dot(Reference(xs, zs, gs, c.groups, c.norm_first), dy);
      };
      test::ExpectNear(dx.ToValues(), test::NumericGradient(x, [&](const Values& v) { return loss(v, z, gamma); }), eps, 2e-5);
      test::ExpectNear(dz.ToValues(), test::NumericGradient(z, [&](const Values& v) { return loss(x, v, gamma); }), eps, 2e-5);
      if (c.gammas == 0) continue;
      test::ExpectNear(gamma_grad.ToValues(), test::NumericGradient(gamma, [&](const Values& v) { return loss(x, z, v); }), eps,
                       2e-5);
    }
  }
}

TEST(GatedRmsNormTest, RefusesGroupsThatDoNotFit) {
  const Owned x(DType::kF32, {2, 6}), y(DType::kF32, {2, 6}), gamma(DType::kF32, {6}), rstd(DType::kF32, {2, 4});
  EXPECT_THROW(GatedRmsNormForward({}, x, AsMatrix(x), gamma, {.groups = 4, .norm = {}}, y, rstd), EngineError);
}

}  // namespace
}  // namespace mbridge
