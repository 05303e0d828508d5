#include "engine/ops/vocab_cross_entropy.h"

#include <algorithm>
#include <vector>

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 7, kVocabulary = 101, kTile = 30, kStride = 33;

struct Outcome {
  Values loss, gradient;
};

// Columns [begin, end) of the vocabulary, as one rank of several holds them, and its state.
class Part {
 public:
  Part(int64_t begin, int64_t end, const Values& labels, const Kind& kind)
      : begin_(begin),
        size_(end - begin),
        kind_(kind),
        kept_(kind.precision, {kRows, size_}),
        tile_(kind.storage, {kRows, kStride}) {
    for (int64_t i = 0; i < kRows; ++i) label_.Set(i, labels[i] - static_cast<double>(begin));
  }
  CrossEntropyState state() const { return {maximum, sum, predicted}; }

  void Fold(const Values& logits) {
    CrossEntropyBegin({}, state());
    for (int64_t first = 0; first < size_; first += kTile) {
      const int64_t n = std::min(kTile, size_ - first);
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 0; j < n; ++j) tile_.Set(i * kStride + j, logits[i * kVocabulary + begin_ + first + j]);
      }
      CrossEntropyFold({}, tile_, first, n, label_, kind_.precision, state(), kept_);
    }
  }
  void Gradients(const Owned& weight, DType gradient_precision, Values* gradient) const {
    for (int64_t first = 0; first < size_; first += kTile) {
      const int64_t n = std::min(kTile, size_ - first);
      CrossEntropyGradient({}, kept_, first, n, label_, weight, state(), gradient_precision, tile_);
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 0; j < n; ++j) (*gradient)[i * kVocabulary + begin_ + first + j] = tile_[i * kStride + j];
      }
    }
  }

  Owned maximum{DType::kF32, {kRows}}, sum{DType::kF32, {kRows}}, predicted{DType::kF32, {kRows}};

 private:
  const int64_t begin_, size_;
  const Kind kind_;
  Owned label_{DType::kI32, {kRows}}, kept_, tile_;
};

// As ranks join the states of their parts.
void Join(std::vector<Part>* parts) {
  Owned largest(DType::kF32, {kRows});
  Values sum(kRows), predicted(kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    largest.Set(i, std::max_element(parts->begin(), parts->end(), [i](const Part& a, const Part& b) {
                     return a.maximum[i] < b.maximum[i];
                   })->maximum[i]);
  }
  for (const Part& part : *parts) {
    CrossEntropyRescale({}, part.state(), largest);
    EXPECT_EQ(part.maximum.ToValues(), largest.ToValues());
    for (int64_t i = 0; i < kRows; ++i) sum[i] += part.sum[i], predicted[i] += part.predicted[i];
  }
  for (Part& part : *parts) {
    for (int64_t i = 0; i < kRows; ++i) part.sum.Set(i, sum[i]), part.predicted.Set(i, predicted[i]);
  }
}

// `ends`: of the parts of the vocabulary.
Outcome RunTiles(const Values& logits, const Values& labels, const Values& weights, const Kind& kind, DType gradient_precision,
                 const std::vector<int64_t>& ends = {kVocabulary}) {
  const Owned weight(DType::kF32, {kRows}, weights), loss(DType::kF32, {kRows});
  std::vector<Part> parts;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    parts.emplace_back(begin, end, labels, kind).Fold(logits);
    begin = end;
  }
  if (parts.size() > 1) Join(&parts);
  CrossEntropyLoss({}, parts.back().state(), loss);
  Outcome run{loss.ToValues(), Values(kRows * kVocabulary)};
  for (const Part& part : parts) part.Gradients(weight, gradient_precision, &run.gradient);
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
    for (const std::vector<int64_t>& ends : {std::vector<int64_t>{kVocabulary}, {37, 38, kVocabulary}, {1, 64, kVocabulary}}) {
      const Outcome run = RunTiles(raw, labels, weights, kind, kind.precision, ends);
      test::ExpectNear(run.loss, expected_loss, 1e-6, 1e-6);
      test::ExpectNear(run.gradient, expected_gradient, kind.epsilon(), 1e-7);
    }
  }
}

TEST(VocabCrossEntropyTest, RescaleMatchesADoubleReference) {
  for (const int64_t rows : {0, 1, 5, 257}) {
    Values maximum = test::RandomValues(rows, 1, 20.0, DType::kF32), sum = test::RandomValues(rows, 2, 50.0, DType::kF32),
           largest = test::RandomValues(rows, 3, 20.0, DType::kF32);
    const Values predicted = test::RandomValues(rows, 4, 20.0, DType::kF32);
    for (int64_t i = 0; i < rows; ++i) {
      sum[i] = std::fabs(sum[i]) + 0.5;
      largest[i] = i % 3 == 1 ? maximum[i] : std::max(maximum[i], largest[i]);
      if (i % 5 == 2) maximum[i] = -INFINITY, sum[i] = 0;  // Nothing folded in yet, here
      if (i % 10 == 2) largest[i] = -INFINITY;             // or in any part.
      if (i % 5 == 3) maximum[i] = -30000, largest[i] = 30000;
    }
    const Owned maximum_data(DType::kF32, {rows}, maximum), sum_data(DType::kF32, {rows}, sum),
        predicted_data(DType::kF32, {rows}, predicted), largest_data(DType::kF32, {rows}, largest);
    CrossEntropyRescale({}, {maximum_data, sum_data, predicted_data}, largest_data);
    EXPECT_EQ(maximum_data.ToValues(), largest);
    EXPECT_EQ(predicted_data.ToValues(), predicted);
    for (int64_t i = 0; i < rows; ++i) {
      const bool moved = maximum[i] != largest[i];
      const double distance = moved ? largest[i] - maximum[i] : 0;
      const double expected = test::RoundTo(DType::kF32, sum[i]) * std::exp(-distance);
      // Half a step of F32 in the difference of the maxima, and a few in the exponential and the product; the CPU twin's
      // exponential ends at exp(-87.3) = 1.216e-38.
      const double error = moved && distance < 100 ? (distance + 4) * 0x1p-24 * expected : moved ? sum[i] * 1.22e-38 : 0;
      EXPECT_NEAR(sum_data[i], expected, error) << i << " of " << rows;
    }
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

// As ranks do it: `ends` of the parts of the vocabulary, each in tiles of `width` columns whose rows are `stride` apart.
struct NarrowTiles {
  int64_t rows, vocabulary, width, stride;
};

// `tile_storage`: of the logits that are folded in; gradients come in that too, but never in F16.
void CheckNarrow(DType precision, DType tile_storage, const NarrowTiles& o) {
  const Kind kind{tile_storage, precision};
  const Values raw = test::RandomValues(o.rows * o.vocabulary, 1, 6.0, tile_storage),
               weights = test::RandomValues(o.rows, 2, 1.0, DType::kF32);
  Values labels(o.rows), logits = raw;
  for (double& z : logits) z = test::RoundTo(precision, z);
  for (int64_t i = 0; i < o.rows; ++i) labels[i] = static_cast<double>(i * 29 % o.vocabulary);
  const Owned maximum(DType::kF32, {o.rows}), sum(DType::kF32, {o.rows}), predicted(DType::kF32, {o.rows}),
      loss(DType::kF32, {o.rows}), label(DType::kI32, {o.rows}, labels), weight(DType::kF32, {o.rows}, weights);
  const Owned kept(precision, {o.rows, o.vocabulary}), gradient(DType::kF32, {o.rows, o.vocabulary});
  Owned tile(tile_storage, {o.rows, o.stride});
  const Owned gradient_tile(tile_storage == DType::kF16 ? DType::kF32 : tile_storage, {o.rows, o.stride});
  const CrossEntropyState state{maximum, sum, predicted};
  const auto for_tiles = [&](const auto& body) {
    for (int64_t first = 0; first < o.vocabulary; first += o.width) body(first, std::min(o.width, o.vocabulary - first));
  };
  CrossEntropyBegin({}, state);
  for_tiles([&](int64_t first, int64_t n) {
    for (int64_t i = 0; i < o.rows * n; ++i) tile.Set(i / n * o.stride + i % n, raw[i / n * o.vocabulary + first + i % n]);
    CrossEntropyFold({}, tile, first, n, label, precision, state, kept);
  });
  CrossEntropyLoss({}, state, loss);
  for_tiles([&](int64_t first, int64_t n) {
    CrossEntropyGradient({}, kept, first, n, label, weight, state, precision, gradient_tile);
    for (int64_t i = 0; i < o.rows * n; ++i)
      gradient.tensor().as<float>()[i / n * o.vocabulary + first + i % n] =
          static_cast<float>(gradient_tile[i / n * o.stride + i % n]);
  });
  Bounds expected_loss, expected;
  for (int64_t i = 0; i < o.rows; ++i) {
    const double* row = &logits[i * o.vocabulary];
    const double largest = *std::max_element(row, row + o.vocabulary);
    // Sums move within a thread, and where those of a warp, a block and the tiles join.
    const int64_t moves = (4 + o.width / 256) * ((o.vocabulary + o.width - 1) / o.width);
    test::Sum all;
    for (int64_t j = 0; j < o.vocabulary; ++j) all.Add(test::SoftmaxPower(row[j], largest, moves));
    const auto own = static_cast<int64_t>(labels[i]);
    expected_loss.push_back(Log(all.Total()) - (Bounded(row[own]) - largest));
    for (int64_t j = 0; j < o.vocabulary; ++j) {
      const Bounded softmax = test::SoftmaxPower(row[j], largest) / all.Total();
      expected.push_back(Stored((j == own ? softmax - 1 : softmax) * weights[i], precision));
    }
  }
  const std::string variant = " in tiles of " + std::to_string(o.width) + ", stride " + std::to_string(o.stride);
  test::ExpectBounded("CrossEntropyFold's logits" + variant, kind, kept, Bounds(logits.begin(), logits.end()));
  test::ExpectBounded("CrossEntropyLoss" + variant, kind, loss, expected_loss);
  test::ExpectBounded("CrossEntropyGradient" + variant, kind, gradient, expected);
}

TEST(VocabCrossEntropyTest, NarrowTilesWithinTheirBounds) {
  for (const NarrowTiles& o :
       {NarrowTiles{1, 1, 1, 1}, NarrowTiles{3, 7, 4, 5}, NarrowTiles{5, 127, 33, 37}, NarrowTiles{3, 264, 72, 80},
        NarrowTiles{2, 2050, 1031, 1031}, NarrowTiles{3, 4112, 2056, 2056}, NarrowTiles{1, 4097, 4097, 4100}}) {
    CheckNarrow(DType::kBF16, DType::kBF16, o);
    CheckNarrow(DType::kBF16, DType::kF32, o);
    CheckNarrow(DType::kF16, DType::kF32, o);
    if (test::g_on_device) CheckNarrow(DType::kF16, DType::kF16, o);
  }
}

}  // namespace
}  // namespace mbridge
