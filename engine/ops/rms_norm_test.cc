#include "engine/ops/rms_norm.h"

#include "engine/ops/dropout.h"
#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
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

// Kernels differ by width, and by whether rows are whole vectors.
constexpr test::AwkwardShape kNarrowShapes[] = {{1, 1},    {3, 7},    {5, 33},   {3, 127},  {9, 96},
                                                {2, 264},  {3, 520},  {5, 776},  {3, 1032}, {3, 2047},
                                                {1, 2050}, {2, 2056}, {2, 4097}, {3, 4104}, {1, 8200}};

Bounded RstdOf(const test::Sum& squares, int64_t count) {
  return 1 / Sqrt(squares.Total() / static_cast<double>(count) + test::Constant(kEpsilon));
}

// What is known of the gradients of one row that is normalised: t = dy g and n = x rstd of each element.
struct RowGradient {
  RowGradient(const Values& dy, const Values& x, const Values& gamma, double offset, const Bounded& rstd) : rstd(rstd) {
    test::Sum dots;
    for (size_t j = 0; j < x.size(); ++j) {
      t.push_back(dy[j] * (Bounded(gamma[j]) + offset));
      normal.push_back(x[j] * rstd);
      dots.Add(t[j] * normal[j]);
    }
    dot = dots.Total();
  }
  Bounded Dx(size_t j, DType precision) const {
    return Stored(rstd * (t[j] - normal[j] * (dot / static_cast<double>(t.size()))), precision);
  }
  Bounded rstd, dot;
  Bounds t, normal;
};

Values RowOf(const Values& values, int64_t row, int64_t width) {
  return {values.begin() + row * width, values.begin() + (row + 1) * width};
}

// With a residual: AddRmsNormForward, and its gradient joined.
void CheckNarrow(const Kind& kind, int64_t rows, int64_t width, bool has_residual) {
  const double offset = 1;
  const NormOptions options{kEpsilon, static_cast<float>(offset), kind.precision};
  const auto random = [&](int64_t count, uint32_t seed) { return test::RandomValues(count, seed, 1.5, kind.precision); };
  const Values x = random(rows * width, 1), gamma = random(width, 2), dy = random(rows * width, 4),
               residual = random(rows * width, 5), before = test::RandomValues(width, 6, 1.0, DType::kF32);
  const Shape shape{rows, width};
  const Owned x_data(kind.storage, shape, x), gamma_data(kind.storage, {width}, gamma), hidden(kind.storage, shape, residual),
      y(kind.storage, shape), rstd(DType::kF32, {rows});
  if (has_residual) {
    AddRmsNormForward({}, x_data, hidden, gamma_data, options, hidden, y, rstd);
    Bounds sums;
    for (int64_t i = 0; i < rows * width; ++i) sums.push_back(Stored(Bounded(residual[i]) + x[i], kind.precision));
    test::ExpectBounded("AddRmsNormForward's hidden", kind, hidden, sums);
  } else {
    RmsNormForward({}, x_data, gamma_data, options, y, rstd);
  }
  const Owned& normed = has_residual ? hidden : x_data;
  const Values in = normed.ToValues();
  const Owned dy_data(kind.storage, shape, dy), joined(kind.storage, shape, residual), gamma_grad(DType::kF32, {width}, before);
  const Owned& dx = has_residual ? joined : dy_data;  // In place of either.
  RmsNormBackward({}, dy_data, normed, gamma_data, rstd, has_residual ? joined.tensor() : Tensor(), options, dx, gamma_grad);

  Bounds expected_y, expected_rstd, expected_dx, expected_gamma;
  std::vector<test::Sum> gamma_sums(width);
  for (int64_t i = 0; i < rows; ++i) {
    test::Sum squares;
    for (int64_t j = 0; j < width; ++j) squares.Add(Bounded(in[i * width + j]) * in[i * width + j]);
    expected_rstd.push_back(RstdOf(squares, width));
    const RowGradient gradient(RowOf(dy, i, width), RowOf(in, i, width), gamma, offset, rstd[i]);
    for (int64_t j = 0; j < width; ++j) {
      expected_y.push_back(Stored(in[i * width + j] * expected_rstd[i] * (Bounded(gamma[j]) + offset), kind.precision));
      gamma_sums[j].Add(dy[i * width + j] * gradient.normal[j]);
      const Bounded alone = gradient.Dx(j, kind.precision);
      expected_dx.push_back(has_residual ? Stored(residual[i * width + j] + alone, kind.precision) : alone);
    }
  }
  for (int64_t j = 0; j < width; ++j) expected_gamma.push_back(before[j] + Stored(gamma_sums[j].Total(), kind.precision));
  const std::string forward = has_residual ? "AddRmsNormForward's " : "RmsNormForward's ";
  const std::string backward = has_residual ? "RmsNormBackward with a residual: " : "RmsNormBackward: ";
  test::ExpectBounded(forward + "y", kind, y, expected_y);
  test::ExpectBounded(forward + "rstd", kind, rstd, expected_rstd);
  test::ExpectBounded(backward + "dx", kind, dx, expected_dx);
  test::ExpectBounded(backward + "gamma_grad", kind, gamma_grad, expected_gamma);
}

TEST(RmsNormTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, width] : kNarrowShapes) {
      for (const bool has_residual : {false, true}) CheckNarrow(kind, rows, width, has_residual);
    }
  }
}

// The columns of a token that are normalised together, in the order of their gamma.
struct QkPart {
  bool key;
  std::vector<int64_t> columns;
};

std::vector<QkPart> PartsOf(const QkvLayout& layout, QkNormScope scope) {
  std::vector<QkPart> parts;
  const auto append = [&](bool key, int64_t begin, bool fresh) {
    if (fresh) parts.push_back({key, {}});
    for (int64_t j = 0; j < layout.head_size; ++j) parts.back().columns.push_back(begin + j);
  };
  const bool head_by_head = scope == QkNormScope::kHead;
  for (int64_t head = 0; head < layout.heads; ++head) append(false, layout.query_column(head), head_by_head || head == 0);
  for (int64_t group = 0; group < layout.groups; ++group) append(true, layout.key_column(group), head_by_head || group == 0);
  return parts;
}

Values Picked(const Values& rows, int64_t row, int64_t width, const QkPart& part) {
  Values values;
  for (const int64_t column : part.columns) values.push_back(rows[row * width + column]);
  return values;
}

// Squares and dots, which ranks of a split projection sum up.
void CheckQkSums(const Kind& kind, const QkNormOptions& options, int64_t rows, const Owned& x, const Owned& dy,
                 const Owned (&gammas)[2], double offset) {
  const Owned squares(DType::kF32, {rows, 2}), dots(DType::kF32, {rows, 2}),
      rstd(DType::kF32, {rows, 2}, test::RandomValues(2 * rows, 9, 1.0, DType::kF32));
  QkNormSquares({}, x, options, squares);
  QkNormDots({}, dy, x, gammas[0], gammas[1], rstd, options, dots);
  Bounds expected_squares, expected_dots;
  for (int64_t i = 0; i < rows; ++i) {
    for (const QkPart& part : PartsOf(options.layout, options.scope)) {
      const Values in = Picked(x.ToValues(), i, options.layout.width(), part);
      test::Sum sum;
      for (const double v : in) sum.Add(Bounded(v) * v);
      expected_squares.push_back(sum.Total());
      expected_dots.push_back(RowGradient(Picked(dy.ToValues(), i, options.layout.width(), part), in, gammas[part.key].ToValues(),
                                          offset, rstd[2 * i + part.key])
                                  .dot);
    }
  }
  test::ExpectBounded("QkNormSquares", kind, squares, expected_squares);
  test::ExpectBounded("QkNormDots", kind, dots, expected_dots);
}

void CheckNarrowQk(const Kind& kind, const QkvLayout& layout, QkNormScope scope) {
  constexpr int64_t rows = 3;
  const double offset = 1;
  const bool whole = scope == QkNormScope::kProjection;
  const int64_t width = layout.width(), sizes[] = {whole ? layout.heads * layout.head_size : layout.head_size,
                                                   whole ? layout.groups * layout.head_size : layout.head_size};
  const QkNormOptions options{layout, scope, {kEpsilon, static_cast<float>(offset), kind.precision}};
  const auto random = [&](int64_t count, uint32_t seed) { return test::RandomValues(count, seed, 1.5, kind.precision); };
  const Values x = random(rows * width, 1), dy = random(rows * width, 2), gamma[] = {random(sizes[0], 3), random(sizes[1], 4)};
  const Owned x_data(kind.storage, {rows, width}, x), gradient(kind.storage, {rows, width}, dy), y(kind.storage, {rows, width});
  const Owned gammas[] = {{kind.storage, {sizes[0]}, gamma[0]}, {kind.storage, {sizes[1]}, gamma[1]}},
              grads[] = {{DType::kF32, {sizes[0]}}, {DType::kF32, {sizes[1]}}};
  const Owned rstd(DType::kF32, {rows, whole ? 2 : layout.heads + layout.groups});
  if (whole) CheckQkSums(kind, options, rows, x_data, gradient, gammas, offset);
  QkNormForward({}, x_data, gammas[0], gammas[1], options, y, rstd);
  QkNormBackward({}, gradient, x_data, gammas[0], gammas[1], rstd, options, grads[0], grads[1]);

  Bounds expected_y(x.begin(), x.end()), expected_dx(dy.begin(), dy.end());  // Values stay.
  std::vector<test::Sum> sums[] = {std::vector<test::Sum>(sizes[0]), std::vector<test::Sum>(sizes[1])};
  for (int64_t i = 0; i < rows; ++i) {
    for (const QkPart& part : PartsOf(layout, scope)) {
      const Values in = Picked(x, i, width, part), d = Picked(dy, i, width, part);
      test::Sum squares;
      for (const double v : in) squares.Add(Bounded(v) * v);
      const RowGradient known(d, in, gamma[part.key], offset, RstdOf(squares, static_cast<int64_t>(in.size())));
      for (size_t j = 0; j < in.size(); ++j) {
        const int64_t at = i * width + part.columns[j];
        expected_y[at] = Stored(in[j] * known.rstd * (Bounded(gamma[part.key][j]) + offset), kind.precision);
        expected_dx[at] = known.Dx(j, kind.precision);
        sums[part.key][j].Add(d[j] * known.normal[j]);
      }
    }
  }
  const std::string variant = whole ? " of projections: " : " of heads: ";
  test::ExpectBounded("QkNormForward" + variant + "y", kind, y, expected_y);
  test::ExpectBounded("QkNormBackward" + variant + "dx", kind, gradient, expected_dx);
  for (const bool key : {false, true}) {
    Bounds expected;
    for (const test::Sum& sum : sums[key]) expected.push_back(Stored(sum.Total(), kind.precision));
    test::ExpectBounded("QkNormBackward" + variant + (key ? "keys' gamma" : "queries' gamma"), kind, grads[key], expected);
  }
}

TEST(QkNormTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const int64_t size : {1, 7, 33, 64, 128, 264}) {
      for (const QkvLayout& layout : {QkvLayout{3, 3, size}, QkvLayout{6, 2, size}, QkvLayout{5, 1, size}}) {
        CheckNarrowQk(kind, layout, QkNormScope::kHead);
        CheckNarrowQk(kind, layout, QkNormScope::kProjection);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
