#include "engine/ops/gated_rms_norm.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
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

void CheckNarrow(const Kind& kind, const Case& c, int64_t rows, int64_t width) {
  const int64_t n = width / c.groups;
  const Values x = test::RandomValues(rows * width, 1, 2.0, kind.precision),
               z = test::RandomValues(rows * width, 2, 2.0, kind.precision),
               gamma = test::RandomValues(c.gammas, 3, 1.0, kind.precision),
               dy = test::RandomValues(rows * width, 4, 1.0, kind.precision);
  const Owned x_data(kind.storage, {rows, width}, x), z_data(kind.storage, {rows, width}, z), g(kind.storage, {c.gammas}, gamma),
      dx(kind.storage, {rows, width}, dy), dz(kind.storage, {rows, width}), y(kind.storage, {rows, width}),
      rstd(DType::kF32, {rows, c.groups}), gamma_grad(DType::kF32, {c.gammas});
  const GatedRmsNormOptions options{
      .groups = c.groups, .norm_before_gate = c.norm_first, .norm = {.epsilon = kEpsilon, .precision = kind.precision}};
  GatedRmsNormForward({}, x_data, AsMatrix(z_data), g, options, y, rstd);
  GatedRmsNormBackward({}, dx, x_data, AsMatrix(z_data), g, rstd, options, dx, AsMatrix(dz), gamma_grad);
  Bounds expected_y, expected_dx, expected_dz, expected_gamma;
  std::vector<test::Sum> sums(c.gammas);
  for (int64_t part = 0; part < rows * c.groups; ++part) {
    const int64_t row = part / c.groups, begin = part % c.groups * n, at = row * width + begin;
    test::Sum squares, dots;
    Bounds open, gate, in, scaled;  // sigmoid(z), silu(z), what is normalised, the gradient of what was.
    for (int64_t j = 0; j < n; ++j) {
      open.push_back(test::Sigmoid(z[at + j]));
      gate.push_back(z[at + j] * open[j]);
      in.push_back(c.norm_first ? x[at + j] : x[at + j] * gate[j]);
      squares.Add(in[j] * in[j]);
      const Bounded d = Bounded(dy[at + j]) * gamma[(begin + j) % c.gammas];
      scaled.push_back(c.norm_first ? d * gate[j] : d);
    }
    const Bounded of_forward = 1 / Sqrt(squares.Total() / static_cast<double>(n) + test::Constant(kEpsilon)), r = rstd[part];
    for (int64_t j = 0; j < n; ++j) {
      const double g_j = gamma[(begin + j) % c.gammas];
      expected_y.push_back(Stored(c.norm_first ? in[j] * of_forward * g_j * gate[j] : in[j] * of_forward * g_j, kind.precision));
      dots.Add(scaled[j] * in[j] * r);
      sums[(begin + j) % c.gammas].Add(Bounded(dy[at + j]) * x[at + j] * r * gate[j]);
    }
    for (int64_t j = 0; j < n; ++j) {
      const Bounded d = r * (scaled[j] - in[j] * r * (dots.Total() / static_cast<double>(n)));
      const Bounded slope = open[j] * (1 + z[at + j] * (1 - open[j]));
      const Bounded of_gate = c.norm_first ? Bounded(dy[at + j]) * gamma[(begin + j) % c.gammas] * (in[j] * r) : d * x[at + j];
      expected_dx.push_back(Stored(c.norm_first ? d : d * gate[j], kind.precision));
      expected_dz.push_back(Stored(of_gate * slope, kind.precision));
    }
  }
  for (const test::Sum& sum : sums) expected_gamma.push_back(Stored(sum.Total(), kind.precision));
  const std::string variant = std::string(c.norm_first ? ", norm first" : "") + ", groups: " + std::to_string(c.groups);
  test::ExpectBounded("GatedRmsNormForward" + variant, kind, y, expected_y);
  test::ExpectBounded("GatedRmsNormBackward's dx" + variant, kind, dx, expected_dx);
  test::ExpectBounded("GatedRmsNormBackward's dz" + variant, kind, dz, expected_dz);
  test::ExpectBounded("GatedRmsNormBackward's gamma_grad" + variant, kind, gamma_grad, expected_gamma);
}

TEST(GatedRmsNormTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const int64_t n : {1, 7, 33, 127, 683}) {
      for (const bool norm_first : {false, true}) {
        CheckNarrow(kind, {1, n, norm_first}, 3, n);
        CheckNarrow(kind, {3, 3 * n, norm_first}, 3, 3 * n);
        CheckNarrow(kind, {3, n, norm_first}, 3, 3 * n);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
