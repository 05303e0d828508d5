#include "engine/ops/moe_permute.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounds;
using test::Owned;
using test::Values;

struct Rows {
  Owned offsets, slots, places;
  ExpertRows view() const { return {offsets, slots, places}; }
};

Rows Sort(const Values& experts, int64_t tokens, int64_t k, int64_t count) {
  Rows rows{{DType::kI32, {count + 1}}, {DType::kI32, {tokens * k}}, {DType::kI32, {tokens * k}}};
  SortByExpert({}, Owned(DType::kI32, {tokens, k}, experts), rows.view());
  return rows;
}

TEST(MoePermuteTest, SortsByExpertThenToken) {
  const Rows rows = Sort({2, 0, 0, 3, 2, 3}, 3, 2, 5);
  EXPECT_EQ(rows.offsets.ToValues(), (Values{0, 2, 2, 4, 6, 6}));
  EXPECT_EQ(rows.slots.ToValues(), (Values{1, 2, 0, 4, 3, 5}));
  EXPECT_EQ(rows.places.ToValues(), (Values{2, 0, 1, 4, 3, 5}));
  const Owned load(DType::kF32, {5}, {1, 1, 1, 1, 1});
  AddExpertLoad({}, rows.view(), load);
  EXPECT_EQ(load.ToValues(), (Values{3, 1, 3, 3, 1}));
}

TEST(MoePermuteTest, GathersAndSums) {
  for (const test::Kind& kind : test::kKinds) {
    const Rows rows = Sort({2, 0, 0, 3, 2, 3}, 3, 2, 5);
    const Values x = test::RandomValues(3 * 4, 1, 1.0, kind.precision), added = test::RandomValues(3 * 4, 2, 1.0, kind.precision);
    const Owned gathered(kind.storage, {6, 4}), sums(kind.storage, {3, 4}), plain(kind.storage, {3, 4});
    GatherRows({}, Owned(kind.storage, {3, 4}, x), rows.view(), gathered);
    for (int64_t row = 0; row < 6; ++row) {
      for (int64_t j = 0; j < 4; ++j) EXPECT_EQ(gathered[row * 4 + j], x[static_cast<int64_t>(rows.slots[row]) / 2 * 4 + j]);
    }
    SumRows({}, gathered, rows.view(), {}, kind.precision, plain);
    SumRows({}, gathered, rows.view(), Owned(kind.storage, {3, 4}, added), kind.precision, sums);
    for (int64_t i = 0; i < 12; ++i) {
      EXPECT_EQ(plain[i], test::RoundTo(kind.precision, 2 * x[i]));
      EXPECT_EQ(sums[i], test::RoundTo(kind.precision, 2 * x[i] + added[i]));
    }
  }
}

TEST(MoePermuteTest, RefusesOtherSizes) {
  const Rows rows = Sort({0, 1}, 1, 2, 2);
  EXPECT_THROW(SortByExpert({}, Owned(DType::kI32, {2, 2}), rows.view()), EngineError);
  EXPECT_THROW(GatherRows({}, Owned(DType::kF32, {1, 4}), rows.view(), Owned(DType::kF32, {3, 4})), EngineError);
}

TEST(MoePermuteTest, NarrowStorageWithinItsBounds) {
  constexpr int64_t experts = 5;
  for (const test::Kind& kind : test::NarrowKinds()) {
    for (const auto& [tokens, n] : test::kAwkwardShapes) {
      for (const int64_t k : {1, 3}) {
        Values chosen;
        for (int64_t slot = 0; slot < tokens * k; ++slot) chosen.push_back(static_cast<double>((slot * 7 + slot / 3) % experts));
        const Rows rows = Sort(chosen, tokens, k, experts);
        const auto random = [&](int64_t count, uint32_t seed) { return test::RandomValues(count, seed, 1.0, kind.precision); };
        const Values x = random(tokens * n, 1), added = random(tokens * n, 2), of_rows = random(tokens * k * n, 3);
        const Owned gathered(kind.storage, {tokens * k, n}), plain(kind.storage, {tokens, n}), joined(kind.storage, {tokens, n}),
            rows_data(kind.storage, {tokens * k, n}, of_rows);
        GatherRows({}, Owned(kind.storage, {tokens, n}, x), rows.view(), gathered);
        SumRows({}, rows_data, rows.view(), {}, kind.precision, plain);
        SumRows({}, rows_data, rows.view(), Owned(kind.storage, {tokens, n}, added), kind.precision, joined);
        Bounds expected, expected_plain, expected_joined;
        for (int64_t i = 0; i < tokens * k * n; ++i)
          expected.push_back(x[static_cast<int64_t>(rows.slots[i / n]) / k * n + i % n]);
        for (int64_t i = 0; i < tokens * n; ++i) {
          test::Sum sum;
          for (int64_t j = 0; j < k; ++j) sum.Add(of_rows[static_cast<int64_t>(rows.places[i / n * k + j]) * n + i % n]);
          expected_plain.push_back(Stored(sum.Total(), kind.precision));
          expected_joined.push_back(Stored(expected_plain.back() + added[i], kind.precision));
        }
        test::ExpectBounded("GatherRows", kind, gathered, expected);
        test::ExpectBounded("SumRows", kind, plain, expected_plain);
        test::ExpectBounded("SumRows, added", kind, joined, expected_joined);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
