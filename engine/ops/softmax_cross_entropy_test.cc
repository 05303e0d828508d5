#include "engine/ops/softmax_cross_entropy.h"

#include <algorithm>

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kVocabulary = 53;

double Loss(const Values& z, int64_t row, int64_t label) {
  double sum = 0;
  for (int64_t j = 0; j < kVocabulary; ++j) sum += std::exp(z[row * kVocabulary + j]);
  return std::log(sum) - z[row * kVocabulary + label];
}

TEST(SoftmaxCrossEntropy, MatchesADoubleReference) {
  const Values labels{0, 52, 7, 7, 30}, weights{0.5, 1, 0, -2, 0.01};
  const Owned label(DType::kI32, {kRows}, labels), weight(DType::kF32, {kRows}, weights), loss(DType::kF32, {kRows});
  for (const Kind& kind : test::kKinds) {
    const Values logits = test::RandomValues(kRows * kVocabulary, 1, 5.0, kind.precision);
    const Owned z(kind.storage, {kRows, kVocabulary}, logits);
    SoftmaxCrossEntropy({}, z, label, weight, kind.precision, loss);
    Values losses, gradients;
    for (int64_t i = 0; i < kRows; ++i) {
      const auto own = static_cast<int64_t>(labels[i]);
      losses.push_back(Loss(logits, i, own));
      for (int64_t j = 0; j < kVocabulary; ++j) {
        gradients.push_back((std::exp(-Loss(logits, i, j)) - (j == own ? 1.0 : 0.0)) * weights[i]);
      }
    }
    test::ExpectNear(loss.ToValues(), losses, 1e-6, 1e-6);
    test::ExpectNear(z.ToValues(), gradients, 1.1 * kind.epsilon() + 2e-6, 1e-7);
  }
}

TEST(SoftmaxCrossEntropy, LeavesTheLogitsWithoutWeights) {
  const Values logits = test::RandomValues(kRows * kVocabulary, 1, 5.0);
  const Owned z(DType::kBF16, {kRows, kVocabulary}, logits), label(DType::kI32, {kRows}, Values(kRows, 3.0));
  const Owned loss(DType::kF32, {kRows});
  SoftmaxCrossEntropy({}, z, label, {}, DType::kBF16, loss);
  EXPECT_EQ(z.ToValues(), logits);
  EXPECT_NEAR(loss[0], Loss(logits, 0, 3), 1e-5);
}

void CheckNarrow(const Kind& kind, int64_t rows, int64_t n, double spread) {
  const Values logits = test::RandomValues(rows * n, 1, spread, kind.precision),
               weights = test::RandomValues(rows, 2, 1.0, DType::kF32);
  Values labels(rows);
  for (int64_t i = 0; i < rows; ++i) labels[i] = static_cast<double>((i * 29 + n - 1) % n);
  const Owned z(kind.storage, {rows, n}, logits), label(DType::kI32, {rows}, labels), weight(DType::kF32, {rows}, weights),
      loss(DType::kF32, {rows}), loss_alone(DType::kF32, {rows});
  SoftmaxCrossEntropy({}, z, label, {}, kind.precision, loss_alone);
  EXPECT_EQ(z.ToValues(), logits) << "SoftmaxCrossEntropy without weights changes logits of " << NameOf(kind.precision);
  SoftmaxCrossEntropy({}, z, label, weight, kind.precision, loss);
  Bounds expected_loss, expected;
  for (int64_t i = 0; i < rows; ++i) {
    const double* row = &logits[i * n];
    const double largest = *std::max_element(row, row + n);
    // Sums move within a thread, and where those of a warp, a block and up to 16 blocks join.
    const int64_t moves = 20 + n / 256;
    test::Sum sum;
    for (int64_t j = 0; j < n; ++j) sum.Add(test::SoftmaxPower(row[j], largest, moves));
    const auto own = static_cast<int64_t>(labels[i]);
    expected_loss.push_back(Log(sum.Total()) - (Bounded(row[own]) - largest));
    for (int64_t j = 0; j < n; ++j) {
      const Bounded softmax = test::SoftmaxPower(row[j], largest) / sum.Total();
      expected.push_back(Stored((j == own ? softmax - 1 : softmax) * weights[i], kind.precision));
    }
  }
  test::ExpectBounded("SoftmaxCrossEntropy's loss", kind, loss, expected_loss);
  test::ExpectBounded("SoftmaxCrossEntropy's loss without a gradient", kind, loss_alone, expected_loss);
  test::ExpectBounded("SoftmaxCrossEntropy's gradient", kind, z, expected);
}

TEST(SoftmaxCrossEntropy, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [rows, n] : test::kAwkwardShapes) {
      for (const double spread : {1.0, 8.0}) CheckNarrow(kind, rows, n, spread);
    }
    CheckNarrow(kind, 3, 20011, 4.0);
    CheckNarrow(kind, 2, 33032, 4.0);
  }
}

}  // namespace
}  // namespace mbridge
