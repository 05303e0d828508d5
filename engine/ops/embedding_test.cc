#include "engine/ops/embedding.h"

#include "engine/ops/dropout.h"
#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kBatch = 3, kSeq = 23, kWidth = 70, kVocabulary = 12, kPlaces = 23;

Values Ids(uint32_t seed, int64_t end) {
  std::mt19937 engine(seed);
  Values ids(kBatch * kSeq);
  for (double& id : ids) id = static_cast<double>(engine() % end);
  return ids;
}

TEST(EmbeddingTest, ForwardIsSequenceFirst) {
  for (const Kind& kind : test::kKinds) {
    for (bool dropout : {false, true}) {
      const Values words = test::RandomValues(kVocabulary * kWidth, 1, 1.0, kind.precision),
                   places = test::RandomValues(kPlaces * kWidth, 2, 1.0, kind.precision);
      const Values tokens = Ids(3, kVocabulary), positions = Ids(4, kPlaces);
      Values mask = test::RandomValues(kSeq * kBatch * kWidth, 5);
      for (double& m : mask) m = m > -0.5 ? 1 : 0;
      const Owned y(kind.storage, {kSeq, kBatch, kWidth}), keep(DType::kU8, {kSeq, kBatch, kWidth}, mask);
      EmbeddingForward({}, Owned(DType::kI32, {kBatch, kSeq}, tokens), Owned(DType::kI32, {kBatch, kSeq}, positions),
                       Owned(kind.storage, {kVocabulary, kWidth}, words), Owned(kind.storage, {kPlaces, kWidth}, places),
                       dropout ? keep.tensor() : Tensor(), 0.25, kind.precision, y);
      for (int64_t s = 0; s < kSeq; ++s) {
        for (int64_t b = 0; b < kBatch; ++b) {
          for (int64_t j = 0; j < kWidth; ++j) {
            const int64_t at = (s * kBatch + b) * kWidth + j, id = b * kSeq + s;
            double v = test::RoundTo(kind.precision, words[tokens[id] * kWidth + j] + places[positions[id] * kWidth + j]);
            if (dropout)
              v = test::RoundTo(kind.precision, static_cast<float>(v * mask[at]) * DropoutScale(DropoutKind::kEager, 0.25));
            ASSERT_EQ(y[at], v);
          }
        }
      }
    }
  }
}

TEST(EmbeddingTest, WithoutPositionTable) {
  const Values words = test::RandomValues(kVocabulary * kWidth, 1), tokens = Ids(3, kVocabulary);
  const Owned y(DType::kF32, {kSeq, kBatch, kWidth});
  EmbeddingForward({}, Owned(DType::kI32, {kBatch, kSeq}, tokens), {}, Owned(DType::kF32, {kVocabulary, kWidth}, words), {}, {},
                   0.0, DType::kBF16, y);
  EXPECT_EQ(y[(4 * kBatch + 2) * kWidth + 7], words[tokens[2 * kSeq + 4] * kWidth + 7]);
}

// Chunks of 32 ids in [b, s] order, rounded after each chunk.
Values Gathered(const Values& ids, const Values& dy, DType precision) {
  Values sum(kVocabulary * kWidth);
  for (int64_t first = 0; first < kBatch * kSeq; first += 32) {
    Values chunk(kVocabulary * kWidth);
    std::vector<bool> seen(kVocabulary);
    for (int64_t i = first; i < std::min(first + 32, kBatch * kSeq); ++i) {
      const int64_t b = i / kSeq, s = i % kSeq, id = static_cast<int64_t>(ids[i]);
      seen[id] = true;
      for (int64_t j = 0; j < kWidth; ++j) chunk[id * kWidth + j] += dy[(s * kBatch + b) * kWidth + j];
    }
    for (int64_t i = 0; i < kVocabulary * kWidth; ++i) {
      if (seen[i / kWidth]) sum[i] = test::RoundTo(precision, sum[i] + chunk[i]);
    }
  }
  return sum;
}

TEST(EmbeddingTest, BackwardIntoMainAndTiedGradients) {
  for (const Kind& kind : test::kKinds) {
    Values ids = Ids(6, kVocabulary - 2);  // The last two rows are never touched.
    const Values dy = test::RandomValues(kSeq * kBatch * kWidth, 7, 1.0, kind.precision);
    const Values before = test::RandomValues(kVocabulary * kWidth, 8, 1.0, DType::kF32);
    const Values gathered = Gathered(ids, dy, kind.precision);
    for (EmbeddingSum sum : {EmbeddingSum::kMainGradient, EmbeddingSum::kTiedGradient}) {
      const Owned grad(DType::kF32, {kVocabulary, kWidth}, before), touched(DType::kI32, {kVocabulary}, Values(kVocabulary, -1));
      const Owned scratch(DType::kF32, {kBatch * kSeq, kWidth});
      EmbeddingBackward({}, Owned(DType::kI32, {kBatch, kSeq}, ids), Owned(kind.storage, {kSeq, kBatch, kWidth}, dy),
                        kind.precision, sum, grad, touched, scratch);
      Values expected = before;
      for (int64_t i = 0; i < (kVocabulary - 2) * kWidth; ++i) {
        expected[i] = sum == EmbeddingSum::kMainGradient
                          ? static_cast<float>(before[i] + gathered[i])
                          : test::RoundTo(kind.precision, test::RoundTo(kind.precision, before[i]) + gathered[i]);
      }
      test::ExpectNear(grad.ToValues(), expected, kind.epsilon(), 4e-6);
      EXPECT_EQ(touched.ToValues(), Values(kVocabulary, -1));
    }
  }
}

TEST(EmbeddingTest, ManyIdsAreRoundedOnce) {
  constexpr int64_t kLong = 3100, kNarrow = 3;
  Values ids(kLong), dy = test::RandomValues(kLong * kNarrow, 9);
  double sum = 0;
  for (int64_t i = 0; i < kLong; ++i) {
    ids[i] = i % 5 == 0 ? 1 : 0;
    if (i % 5 == 0) sum += dy[i * kNarrow + 2];
  }
  const Owned grad(DType::kF32, {3, kNarrow}), touched(DType::kI32, {3}, Values(3, -1)), scratch(DType::kF32, {kLong, kNarrow});
  EmbeddingBackward({}, Owned(DType::kI32, {1, kLong}, ids), Owned(DType::kBF16, {kLong, 1, kNarrow}, dy), DType::kBF16,
                    EmbeddingSum::kMainGradient, grad, touched, scratch);
  EXPECT_EQ(grad[kNarrow + 2], test::RoundTo(DType::kBF16, sum));
  EXPECT_EQ(grad[2 * kNarrow], 0.0);
}

// Ids of [b, s], some of them of another rank's table.
Values SomeIds(int64_t count, int64_t end, uint32_t seed) {
  std::mt19937 engine(seed);
  Values ids(count);
  for (double& id : ids) id = engine() % 7 == 0 ? -1.0 : static_cast<double>(engine() % end);
  return ids;
}

void CheckNarrowForward(const Kind& kind, int64_t h, bool with_places, bool dropout) {
  constexpr int64_t b = 3, s = 5;
  const Values words = test::RandomValues(kVocabulary * h, 1, 1.0, kind.precision),
               places = test::RandomValues(kPlaces * h, 2, 1.0, kind.precision), random = test::RandomValues(s * b * h, 5);
  Values ids = SomeIds(b * s, kVocabulary, 3), positions = SomeIds(b * s, kPlaces, 4), mask(s * b * h);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = random[i] > -0.5 ? 1 : 0;
  if (with_places) {
    for (Values* all : {&ids, &positions})
      for (double& id : *all) id = std::max(id, 0.0);
  }
  const Owned y(kind.storage, {s, b, h}), keep(DType::kU8, {s, b, h}, mask), table(kind.storage, {kPlaces, h}, places);
  EmbeddingForward({}, Owned(DType::kI32, {b, s}, ids), Owned(DType::kI32, {b, s}, positions),
                   Owned(kind.storage, {kVocabulary, h}, words), with_places ? table.tensor() : Tensor(),
                   dropout ? keep.tensor() : Tensor(), 0.25, kind.precision, y);
  Bounds expected;
  for (int64_t i = 0; i < s * b * h; ++i) {
    const int64_t row = i / h, id = row % b * s + row / b, j = i % h;
    Bounded v = ids[id] < 0 ? 0.0 : words[static_cast<int64_t>(ids[id]) * h + j];
    if (with_places) v = Stored(v + places[static_cast<int64_t>(positions[id]) * h + j], kind.precision);
    if (dropout) v = Stored(v * mask[i] * DropoutScale(DropoutKind::kEager, 0.25), kind.precision);
    expected.push_back(v);
  }
  test::ExpectBounded(std::string("EmbeddingForward") + (with_places ? ", positions" : "") + (dropout ? ", dropout" : ""), kind,
                      y, expected);
}

void CheckNarrowBackward(const Kind& kind, int64_t b, int64_t s, int64_t h, EmbeddingSum sum) {
  constexpr int64_t kChunk = 32, kMaxChunked = 3072;
  const Values ids = SomeIds(b * s, kVocabulary, 6), dy = test::RandomValues(s * b * h, 7, 1.0, kind.precision),
               before = test::RandomValues(kVocabulary * h, 8, 1.0, DType::kF32);
  const Owned grad(DType::kF32, {kVocabulary, h}, before), touched(DType::kI32, {kVocabulary}, Values(kVocabulary, -1)),
      scratch(DType::kF32, {b * s, h});
  EmbeddingBackward({}, Owned(DType::kI32, {b, s}, ids), Owned(kind.storage, {s, b, h}, dy), kind.precision, sum, grad, touched,
                    scratch);
  const int64_t chunk = b * s > kMaxChunked ? b * s : kChunk;
  Bounds gathered(kVocabulary * h), expected(before.begin(), before.end());
  for (int64_t first = 0; first < b * s; first += chunk) {
    std::vector<test::Sum> sums(kVocabulary * h);
    std::vector<bool> seen(kVocabulary);
    for (int64_t i = first; i < std::min(first + chunk, b * s); ++i) {
      if (ids[i] < 0) continue;
      const auto id = static_cast<int64_t>(ids[i]);
      seen[id] = true;
      for (int64_t j = 0; j < h; ++j) sums[id * h + j].Add(dy[(i % s * b + i / s) * h + j]);
    }
    for (int64_t at = 0; at < kVocabulary * h; ++at) {
      if (seen[at / h]) gathered[at] = Stored(gathered[at] + sums[at].Total(), kind.precision);
    }
  }
  for (int64_t at = 0; at < kVocabulary * h; ++at) {
    const int64_t id = at / h;
    if (std::find(ids.begin(), ids.end(), static_cast<double>(id)) == ids.end()) continue;
    expected[at] = sum == EmbeddingSum::kMainGradient
                       ? before[at] + gathered[at]
                       : Stored(test::Stored(before[at], kind.precision) + gathered[at], kind.precision);
  }
  test::ExpectBounded(sum == EmbeddingSum::kMainGradient ? "EmbeddingBackward, main" : "EmbeddingBackward, tied", kind, grad,
                      expected);
  EXPECT_EQ(touched.ToValues(), Values(kVocabulary, -1));
}

TEST(EmbeddingTest, NarrowStorageWithinItsBounds) {
  struct Ids {
    int64_t b, s, h;
  };
  for (const Kind& kind : test::NarrowKinds()) {
    for (const int64_t h : {1, 7, 33, 127, 264, 2050, 2056}) {
      for (const bool with_places : {false, true}) {
        for (const bool dropout : {false, true}) CheckNarrowForward(kind, h, with_places, dropout);
      }
    }
    for (const auto& [b, s, h] :
         {Ids{1, 1, 1}, Ids{3, 23, 7}, Ids{5, 41, 33}, Ids{2, 33, 264}, Ids{1, 31, 2050}, Ids{3, 1031, 3}, Ids{1, 3073, 8}}) {
      for (const EmbeddingSum sum : {EmbeddingSum::kMainGradient, EmbeddingSum::kTiedGradient})
        CheckNarrowBackward(kind, b, s, h, sum);
    }
  }
}

}  // namespace
}  // namespace mbridge
