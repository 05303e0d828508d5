#include "engine/ops/vocab_cross_entropy.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 7, kVocabulary = 101, kTile = 30, kStride = 33;

struct Outcome {
  Values loss, gradient;
};

Outcome RunTiles(const Values& logits, const Values& labels, const Values& weights, const Kind& kind, DType gradient_precision) {
  const Owned maximum(DType::kF32, {kRows}), sum(DType::kF32, {kRows}), predicted(DType::kF32, {kRows}),
      loss(DType::kF32, {kRows});
  const Owned label(DType::kI32, {kRows}, labels), weight(DType::kF32, {kRows}, weights),
      kept(kind.precision, {kRows, kVocabulary});
  Owned tile(kind.storage, {kRows, kStride});
  const CrossEntropyState state{maximum, sum, predicted};
  CrossEntropyBegin({}, state);
  for (int64_t first = 0; first < kVocabulary; first += kTile) {
    const int64_t n = std::min(kTile, kVocabulary - first);
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < n; ++j) tile.Set(i * kStride + j, logits[i * kVocabulary + first + j]);
    }
    CrossEntropyFold({}, tile, first, n, label, kind.precision, state, kept);
  }
  CrossEntropyLoss({}, state, loss);
  Outcome run{loss.ToValues(), Values(kRows * kVocabulary)};
  for (int64_t first = 0; first < kVocabulary; first += kTile) {
    const int64_t n = std::min(kTile, kVocabulary - first);
    CrossEntropyGradient({}, kept, first, n, label, weight, state, gradient_precision, tile);
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < n; ++j) run.gradient[i * kVocabulary + first + j] = tile[i * kStride + j];
    }
  }
  return run;
}

TEST(VocabCrossEntropyTest, AgainstDoublePrecision) {
  for (const Kind& kind : test::kKinds) {
    const Values raw = test::RandomValues(kRows * kVocabulary, 1, 6.0, DType::kF32),
                 weights = test::RandomValues(kRows, 2, 1.0, DType::kF32);
    Values labels(kRows), expected_loss(kRows), expected_gradient(raw.size());
    for (int64_t i = 0; i < kRows; ++i) {
      labels[i] = static_cast<double>(i * 29 % kVocabulary);
      double sum = 0;
      for (int64_t j = 0; j < kVocabulary; ++j) sum += std::exp(test::RoundTo(kind.precision, raw[i * kVocabulary + j]));
      expected_loss[i] = std::log(sum) - test::RoundTo(kind.precision, raw[i * kVocabulary + labels[i]]);
      for (int64_t j = 0; j < kVocabulary; ++j) {
        const double p = std::exp(test::RoundTo(kind.precision, raw[i * kVocabulary + j])) / sum;
        expected_gradient[i * kVocabulary + j] = (p - (j == labels[i] ? 1 : 0)) * weights[i];
      }
    }
    const Outcome run = RunTiles(raw, labels, weights, kind, kind.precision);
    test::ExpectNear(run.loss, expected_loss, 1e-6, 1e-6);
    test::ExpectNear(run.gradient, expected_gradient, kind.epsilon(), 1e-7);
  }
}

TEST(VocabCrossEntropyTest, TheFusedKernelRoundsGradientsToBF16) {
  const Kind kind = test::kKinds[0];
  const Values raw = test::RandomValues(kRows * kVocabulary, 1, 6.0, DType::kF32);
  const Outcome run = RunTiles(raw, Values(kRows, 5), Values(kRows, 0.7), kind, DType::kBF16);
  for (double g : run.gradient) EXPECT_EQ(g, test::RoundTo(DType::kBF16, g));
}

TEST(VocabCrossEntropyTest, LargeLogitsDoNotOverflow) {
  Values raw(kRows * kVocabulary, -30000.0);
  for (int64_t i = 0; i < kRows; ++i) raw[i * kVocabulary + 100] = 30000.0;  // The largest comes last.
  const Outcome run = RunTiles(raw, Values(kRows, 100), Values(kRows, 1.0), test::kKinds[0], DType::kF32);
  for (double loss : run.loss) EXPECT_EQ(loss, 0.0);
  raw[3] = NAN;
  EXPECT_TRUE(std::isnan(RunTiles(raw, Values(kRows, 100), Values(kRows, 1.0), test::kKinds[0], DType::kF32).loss[0]));
}

}  // namespace
}  // namespace mbridge
