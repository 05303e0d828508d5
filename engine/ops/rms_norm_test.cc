#include "engine/ops/rms_norm.h"

#include "engine/ops/dropout.h"
#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kWidth = 37;
constexpr float kEpsilon = 1e-2f;  // Large enough to matter.

// One row of `count` elements.
void NormRow(const double* x, const double* gamma, int64_t count, double* y, double gamma_offset = 0) {
  double squares = 0;
  for (int64_t j = 0; j < count; ++j) squares += x[j] * x[j] / static_cast<double>(count);
  for (int64_t j = 0; j < count; ++j) y[j] = x[j] / std::sqrt(squares + kEpsilon) * (gamma[j] + gamma_offset);
}

Values Reference(const Values& x, const Values& gamma, double offset) {
  Values y(x.size());
  for (int64_t i = 0; i < kRows; ++i) NormRow(x.data() + i * kWidth, gamma.data(), kWidth, y.data() + i * kWidth, offset);
  return y;
}

// Rounded, then added to what was there.
Values Accumulated(Values gradient, DType precision, double before) {
  for (double& v : gradient) v = test::RoundTo(precision, v) + before;
  return gradient;
}

void CheckNorm(const Kind& kind, float offset) {
  const Values x = test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision),
               gamma = test::RandomValues(kWidth, 2, 1.5, kind.precision),
               dy = test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision);
  const Owned x_data(kind.storage, {kRows, kWidth}, x), gamma_data(kind.storage, {kWidth}, gamma);
  const Owned dy_data(kind.storage, {kRows, kWidth}, dy), y(kind.storage, {kRows, kWidth}), dx(kind.storage, {kRows, kWidth});
  const Owned rstd(DType::kF32, {kRows}), gamma_grad(DType::kF32, {kWidth}, Values(kWidth, 1.0));
  RmsNormForward({}, x_data, gamma_data, {kEpsilon, offset, kind.precision}, y, rstd);
  RmsNormBackward({}, dy_data, x_data, gamma_data, rstd, {}, {kEpsilon, offset, kind.precision}, dx, gamma_grad);
  test::ExpectNear(y.ToValues(), Reference(x, gamma, offset), kind.epsilon(), 1e-6);
  for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
  test::ExpectNear(dx.ToValues(),
                   test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, gamma, offset), dy); }),
                   kind.epsilon(), 2e-6);
  const Values slope = test::NumericGradient(gamma, [&](const Values& v) { return test::Dot(Reference(x, v, offset), dy); });
  test::ExpectNear(gamma_grad.ToValues(), Accumulated(slope, kind.precision, 1.0), kind.epsilon(), 2 * kind.epsilon());
}

TEST(RmsNormTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (float offset : {0.0f, 1.0f}) CheckNorm(kind, offset);
  }
}

TEST(RmsNormTest, BackwardJoinsTheResidualGradientWithASecondRounding) {
  for (const Kind& kind : test::kKinds) {
    const NormOptions options{kEpsilon, 0.0f, kind.precision};
    const Values residual = test::RandomValues(kRows * kWidth, 5, 1.0, kind.precision);
    const Owned x(kind.storage, {kRows, kWidth}, test::RandomValues(kRows * kWidth, 1, 2.0, kind.precision)),
        gamma(kind.storage, {kWidth}, test::RandomValues(kWidth, 2, 1.5, kind.precision)),
        dy(kind.storage, {kRows, kWidth}, test::RandomValues(kRows * kWidth, 3, 1.0, kind.precision));
    const Owned y(kind.storage, {kRows, kWidth}), alone(kind.storage, {kRows, kWidth}),
        joined(kind.storage, {kRows, kWidth}, residual);
    const Owned rstd(DType::kF32, {kRows}), gamma_grad(DType::kF32, {kWidth});
    RmsNormForward({}, x, gamma, options, y, rstd);
    RmsNormBackward({}, dy, x, gamma, rstd, {}, options, alone, gamma_grad);
    RmsNormBackward({}, dy, x, gamma, rstd, joined, options, joined, gamma_grad);
    for (int64_t i = 0; i < kRows * kWidth; ++i) EXPECT_EQ(joined[i], test::RoundTo(kind.precision, residual[i] + alone[i])) << i;
  }
}

constexpr QkvLayout kLayout{.heads = 4, .groups = 2, .head_size = 6};

// Groups of two queries, a key and a value: slots 0, 1 and 2 of every four are normalised.
Values QkHeadReference(const Values& qkv, const Values& query_gamma, const Values& key_gamma, double offset) {
  Values y = qkv;
  const int64_t d = kLayout.head_size;
  for (int64_t slot = 0; slot * d < static_cast<int64_t>(qkv.size()); ++slot) {
    if (slot % 4 == 3) continue;
    NormRow(qkv.data() + slot * d, (slot % 4 == 2 ? key_gamma : query_gamma).data(), d, y.data() + slot * d, offset);
  }
  return y;
}

// The queries of a token (slots 0, 1, 4, 5 of its eight) are one row, its keys (2, 6) another.
Values QkProjectionReference(const Values& qkv, const Values& query_gamma, const Values& key_gamma, double offset) {
  Values y = qkv;
  const int64_t d = kLayout.head_size;
  for (int64_t row = 0; row < kRows; ++row) {
    for (const std::vector<int64_t>& slots : {std::vector<int64_t>{0, 1, 4, 5}, {2, 6}}) {
      Values joined, normed(slots.size() * d);
      for (int64_t slot : slots)
        for (int64_t j = 0; j < d; ++j) joined.push_back(qkv[row * kLayout.width() + slot * d + j]);
      NormRow(joined.data(), (slots.size() == 2 ? key_gamma : query_gamma).data(), static_cast<int64_t>(joined.size()),
              normed.data(), offset);
      for (size_t i = 0; i < normed.size(); ++i) y[row * kLayout.width() + slots[i / d] * d + i % d] = normed[i];
    }
  }
  return y;
}

void CheckQkNorm(const Kind& kind, QkNormScope scope, float offset) {
  const bool whole = scope == QkNormScope::kProjection;
  const int64_t width = kLayout.width(), d = kLayout.head_size, queries = whole ? 4 * d : d, keys = whole ? 2 * d : d;
  const QkNormOptions options{kLayout, scope, {kEpsilon, offset, kind.precision}};
  const Values x = test::RandomValues(kRows * width, 1, 2.0, kind.precision), dy = test::RandomValues(kRows * width, 3);
  const Values query = test::RandomValues(queries, 2, 1.5, kind.precision),
               key = test::RandomValues(keys, 4, 1.5, kind.precision);
  const Owned x_data(kind.storage, {kRows, width}, x), q(kind.storage, {queries}, query), k(kind.storage, {keys}, key);
  const Owned gradient(kind.storage, {kRows, width}, dy), y(kind.storage, {kRows, width});
  const Owned rstd(DType::kF32, {kRows, whole ? 2 : 6}), q_grad(DType::kF32, {queries}, Values(queries, 1.0)),
      k_grad(DType::kF32, {keys});
  const auto reference = [&](const Values& a, const Values& b, const Values& c) {
    return whole ? QkProjectionReference(a, b, c, offset) : QkHeadReference(a, b, c, offset);
  };
  QkNormForward({}, x_data, q, k, options, y, rstd);
  test::ExpectNear(y.ToValues(), reference(x, query, key), kind.epsilon(), 1e-6);
  QkNormBackward({}, gradient, x_data, q, k, rstd, options, q_grad, k_grad);
  const auto loss = [&](const Values& a, const Values& b, const Values& c) { return test::Dot(reference(a, b, c), dy); };
  test::ExpectNear(gradient.ToValues(), test::NumericGradient(x, [&](const Values& v) { return loss(v, query, key); }),
                   kind.epsilon(), 2e-6);
  const Values q_slope = test::NumericGradient(query, [&](const Values&v) { return loss(x, v, key); }),
               k_slope = test::NumericGradient(key, [&](const Values&v) { return loss(x, query, v); });
  test::ExpectNear(q_grad.ToValues(), Accumulated(q_slope, kind.precision, 1.0), kind.epsilon(), 2 * kind.epsilon());
  test::ExpectNear(k_grad.ToValues(), Accumulated(k_slope, kind.precision, 0.0), kind.epsilon(), 2 * kind.epsilon());
}

// The columns of group `group` of kLayout, which is what a rank of two holds.
Values GroupOf(const Values& rows, int64_t group, int64_t group_width) {
  Values part;
  const auto width = static_cast<int64_t>(2 * group_width);
  for (size_t begin = 0; begin < rows.size(); begin += width) {
    const auto from = rows.begin() + begin + group * group_width;
    part.insert(part.end(), from, from + group_width);
  }
  return part;
}

TEST(QkNormTest, ProjectionSplitOverTwoRanks) {
  const int64_t d = kLayout.head_size, width = kLayout.width();
  const QkvLayout half{2, 1, d};
  const NormOptions norm{kEpsilon, 0.0f, DType::kF32};
  const auto random = [](int64_t count, uint32_t seed) { return test::RandomValues(count, seed, 1.5, DType::kF32); };
  const Values x = random(kRows * width, 1), dy = random(kRows * width, 2), query = random(4 * d, 3), key = random(2 * d, 4);
  const Owned whole_x(DType::kF32, {kRows, width}, x), q(DType::kF32, {4 * d}, query), k(DType::kF32, {2 * d}, key);
  const Owned y(DType::kF32, {kRows, width}), rstd(DType::kF32, {kRows, 2}), gradient(DType::kF32, {kRows, width}, dy);
  const Owned q_grad(DType::kF32, {4 * d}), k_grad(DType::kF32, {2 * d});
  const QkNormOptions whole{kLayout, QkNormScope::kProjection, norm};
  QkNormForward({}, whole_x, q, k, whole, y, rstd);
  QkNormBackward({}, gradient, whole_x, q, k, rstd, whole, q_grad, k_grad);

  const auto owned = [](const Shape& shape, const Values& values = {}) {
    return values.empty() ? Owned(DType::kF32, shape) : Owned(DType::kF32, shape, values);
  };
  const Owned sums = owned({kRows, 2});
  const auto add = [&](const Owned& part) {
    for (int64_t i = 0; i < 2 * kRows; ++i) sums.tensor().as<float>()[i] += part.tensor().as<float>()[i];
  };
  const QkNormOptions options{half, QkNormScope::kProjection, norm, sums, 2};
  std::vector<Owned> xs, qs, ks, ys, rstds, gradients, q_grads, k_grads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    xs.push_back(owned({kRows, width / 2}, GroupOf(x, rank, width / 2)));
    gradients.push_back(owned({kRows, width / 2}, GroupOf(dy, rank, width / 2)));
    qs.push_back(owned({2 * d}, Values(query.begin() + rank * 2 * d, query.begin() + (rank + 1) * 2 * d)));
    ks.push_back(owned({d}, Values(key.begin() + rank * d, key.begin() + (rank + 1) * d)));
    ys.push_back(owned({kRows, width / 2}));
    rstds.push_back(owned({kRows, 2}));
    q_grads.push_back(owned({2 * d}));
    k_grads.push_back(owned({d}));
    const Owned part = owned({kRows, 2});
    QkNormSquares({}, xs.back(), options, part);
    add(part);
  }
  for (int rank = 0; rank < 2; ++rank) {
    QkNormForward({}, xs[rank], qs[rank], ks[rank], options, ys[rank], rstds[rank]);
    test::ExpectNear(ys[rank].ToValues(), GroupOf(y.ToValues(), rank, width / 2), 1e-6, 1e-6);
  }
  std::fill_n(sums.tensor().as<float>(), 2 * kRows, 0.0f);
  for (int rank = 0; rank < 2; ++rank) {
    const Owned part = owned({kRows, 2});
    QkNormDots({}, gradients[rank], xs[rank], qs[rank], ks[rank], rstds[rank], options, part);
    add(part);
  }
  for (int rank = 0; rank < 2; ++rank) {
    QkNormBackward({}, gradients[rank], xs[rank], qs[rank], ks[rank], rstds[rank], options, q_grads[rank], k_grads[rank]);
    test::ExpectNear(gradients[rank].ToValues(), GroupOf(gradient.ToValues(), rank, width / 2), 1e-5, 1e-6);
    const Values own_q = q_grad.ToValues(), own_k = k_grad.ToValues();
    test::ExpectNear(q_grads[rank].ToValues(), Values(own_q.begin() + rank * 2 * d, own_q.begin() + (rank + 1) * 2 * d), 1e-5,
                     1e-6);
    test::ExpectNear(k_grads[rank].ToValues(), Values(own_k.begin() + rank * d, own_k.begin() + (rank + 1) * d), 1e-5, 1e-6);
  }
  EXPECT_THROW(QkNormSquares({}, whole_x, {kLayout, QkNormScope::kHead, norm}, sums), EngineError);
}

TEST(QkNormTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (QkNormScope scope : {QkNormScope::kHead, QkNormScope::kProjection}) {
      for (float offset : {0.0f, 1.0f}) CheckQkNorm(kind, scope, offset);
    }
  }
}

TEST(RmsNormTest, OfASumGivesTheBitsOfAdditionAndNorm) {
  for (const Kind& kind : test::kKinds) {
    const auto random = [&](int seed) {
      return Owned(kind.storage, {kRows, kWidth}, test::RandomValues(kRows * kWidth, seed, 2.0, kind.precision));
    };
    const Owned x = random(1), residual = random(2),
                gamma(kind.storage, {kWidth}, test::RandomValues(kWidth, 3, 1.5, kind.precision));
    const Owned sum(kind.storage, {kRows, kWidth}), y(kind.storage, {kRows, kWidth}), rstd(DType::kF32, {kRows});
    const Owned fused_y(kind.storage, {kRows, kWidth}), fused_rstd(DType::kF32, {kRows});
    const NormOptions options{kEpsilon, 1.0f, kind.precision};
    BiasDropoutAddForward({}, x, {}, residual, {}, 0.0, DropoutKind::kCompiled, kind.precision, sum);
    RmsNormForward({}, sum, gamma, options, y, rstd);
    AddRmsNormForward({}, x, residual, gamma, options, residual, fused_y, fused_rstd);
    EXPECT_EQ(residual.ToValues(), sum.ToValues());
    EXPECT_EQ(fused_y.ToValues(), y.ToValues());
    EXPECT_EQ(fused_rstd.ToValues(), rstd.ToValues());
  }
}

TEST(RmsNormTest, MeasuresItsResults) {
  constexpr int64_t kRows = 3, kWidth = 40;
  const Owned x(DType::kBF16, {kRows, kWidth}, test::RandomValues(kRows * kWidth, 1)),
      gamma(DType::kBF16, {kWidth}, test::RandomValues(kWidth, 2));
  const Owned y(DType::kBF16, {kRows, kWidth}), rstd(DType::kF32, {kRows}), dx(DType::kBF16, {kRows, kWidth}),
      sums(DType::kF32, {kWidth});
  const Owned amax(DType::kF32, {1}), dx_amax(DType::kF32, {1}, {1e6});
  const auto largest = [](const Owned& values) {
    double most = 0;
    for (const double value : values.ToValues()) most = std::max(most, std::fabs(value));
    return most;
  };
  RmsNormForward({}, x, gamma, {.precision = DType::kBF16, .amax = amax}, y, rstd);
  EXPECT_EQ(amax[0], largest(y));
  RmsNormBackward({}, y, x, gamma, rstd, {}, {.precision = DType::kBF16, .amax = dx_amax}, dx, sums);
  EXPECT_EQ(dx_amax[0], 1e6);  // Raised only.
}

}  // namespace
}  // namespace mbridge
