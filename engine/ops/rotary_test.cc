#include "engine/ops/rotary.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kLength = 5, kBatch = 2;
constexpr QkvLayout kLayout{.heads = 4, .groups = 2, .head_size = 10};

struct Tables {
  int64_t half;
  Values cosine, sine;
};

Tables MakeTables(int64_t half, DType precision) {
  Tables tables{half, {}, {}};
  for (int64_t i = 0; i < kLength; ++i) {
    for (int64_t j = 0; j < half; ++j) {
      const double angle = 0.7 * static_cast<double>(i) / static_cast<double>(1 + j);
      tables.cosine.push_back(test::RoundTo(precision, std::cos(angle)));
      tables.sine.push_back(test::RoundTo(precision, std::sin(angle)));
    }
  }
  return tables;
}

// Turns by a matrix product with the rotation of every pair; values (every fourth slot) stay.
Values Reference(const Values& x, const Tables& tables, RotaryPairs pairs) {
  Values y = x;
  const int64_t d = kLayout.head_size, half = tables.half;
  for (int64_t slot = 0; slot < static_cast<int64_t>(x.size()) / d; ++slot) {
    if (slot % 4 == 3) continue;
    const int64_t position = slot * d / kLayout.width() / kBatch;
    for (int64_t j = 0; j < half; ++j) {
      const double c = tables.cosine[position * half + j], s = tables.sine[position * half + j];
      const int64_t first = slot * d + (pairs == RotaryPairs::kHalves ? j : 2 * j);
      const int64_t second = pairs == RotaryPairs::kHalves ? first + half : first + 1;
      y[first] = c * x[first] - s * x[second];
      y[second] = s * x[first] + c * x[second];
    }
  }
  return y;
}

void CheckTurns(RotaryPairs pairs) {
  const Shape shape{kLength, kBatch, kLayout.width()};
  for (int64_t half : {5, 3}) {  // All of a head and a part of it.
    for (const Kind& kind : test::kKinds) {
      const Tables tables = MakeTables(half, kind.precision);
      const Owned cosine(DType::kF32, {kLength, half}, tables.cosine), sine(DType::kF32, {kLength, half}, tables.sine);
      const Values x = test::RandomValues(shape.NumElements(), 1, 2.0, kind.precision),
                   dy = test::RandomValues(shape.NumElements(), 2, 1.0, kind.precision);
      const Owned y(kind.storage, shape, x), gradient(kind.storage, shape, dy);
      Rotary({}, y, cosine, sine, kLayout, pairs, RotaryDirection::kForward, kind.precision);
      Rotary({}, gradient, cosine, sine, kLayout, pairs, RotaryDirection::kBackward, kind.precision);
      // Two rounded products of up to 2 and their rounded sum.
      test::ExpectNear(y.ToValues(), Reference(x, tables, pairs), kind.epsilon(), 2 * kind.epsilon());
      for (int64_t i = 0; i < shape.NumElements(); ++i) EXPECT_EQ(y[i], test::RoundTo(kind.precision, y[i]));
      const Values slope = test::NumericGradient(x, [&](const Values& v) { return test::Dot(Reference(v, tables, pairs), dy); });
      test::ExpectNear(gradient.ToValues(), slope, kind.epsilon(), kind.epsilon() + 1e-6);
    }
  }
}

TEST(RotaryTest, TurnsAndTurnsGradientsBack) {
  CheckTurns(RotaryPairs::kHalves);
  CheckTurns(RotaryPairs::kInterleaved);
}

// The rounding points of Megatron-LM's unfused form: both products, then the sum.
TEST(RotaryTest, RoundsProductsAndSum) {
  const Tables tables = MakeTables(5, DType::kBF16);
  const Shape shape{kLength, kBatch, kLayout.width()};
  const Owned cosine(DType::kF32, {kLength, 5}, tables.cosine), sine(DType::kF32, {kLength, 5}, tables.sine);
  const Values x = test::RandomValues(shape.NumElements(), 1, 2.0);
  const Owned y(DType::kBF16, shape, x);
  Rotary({}, y, cosine, sine, kLayout, RotaryPairs::kHalves, RotaryDirection::kForward, DType::kBF16);
  const auto round = [](double v) { return test::RoundTo(DType::kBF16, v); };
  for (int64_t i = 0; i < kLength * kBatch; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      const double c = tables.cosine[i / kBatch * 5 + j], s = tables.sine[i / kBatch * 5 + j];
      const double lo = x[i * kLayout.width() + j], hi = x[i * kLayout.width() + j + 5];
      EXPECT_EQ(y[i * kLayout.width() + j], round(round(lo * c) + round(-hi * s)));
      EXPECT_EQ(y[i * kLayout.width() + j + 5], round(round(hi * c) + round(lo * s)));
    }
  }
}

TEST(RotaryTest, RefusesTablesThatDoNotFit) {
  const Owned qkv(DType::kF32, {kLength, kBatch, kLayout.width()}), table(DType::kF32, {kLength, 6}),
      short_table(DType::kF32, {kLength - 1, 5});
  EXPECT_THROW(Rotary({}, qkv, table, table, kLayout, RotaryPairs::kHalves, RotaryDirection::kForward, DType::kF32), EngineError);
  EXPECT_THROW(Rotary({}, qkv, short_table, short_table, kLayout, RotaryPairs::kHalves, RotaryDirection::kForward, DType::kF32),
               EngineError);
}

// Turned by the header's formula; s [positions, half] already has the direction's sign.
void CheckNarrow(const Kind& kind, const QkvLayout& layout, int64_t half, RotaryPairs pairs, RotaryDirection direction) {
  constexpr int64_t length = 5, batch = 3;
  const bool back = direction == RotaryDirection::kBackward, halves = pairs == RotaryPairs::kHalves;
  const int64_t width = layout.width();
  const Values x = test::RandomValues(length * batch * width, 1, 2.0, kind.precision),
               cosine = test::RandomValues(length * half, 2, 1.0, kind.precision),
               sine = test::RandomValues(length * half, 3, 1.0, kind.precision);
  const Owned y(kind.storage, {length, batch, width}, x);
  Rotary({}, y, Owned(DType::kF32, {length, half}, cosine), Owned(DType::kF32, {length, half}, sine), layout, pairs, direction,
         kind.precision);
  std::vector<int64_t> heads;
  for (int64_t head = 0; head < layout.heads; ++head) heads.push_back(layout.query_column(head));
  for (int64_t group = 0; group < layout.groups; ++group) heads.push_back(layout.key_column(group));
  const auto product = [&](const Bounded& a, double b) { return Stored(a * b, kind.precision); };
  Bounds expected(x.begin(), x.end());
  for (int64_t row = 0; row < length * batch; ++row) {
    for (const int64_t head : heads) {
      for (int64_t j = 0; j < half; ++j) {
        const double c = cosine[row / batch * half + j], s = (back ? -1 : 1) * sine[row / batch * half + j];
        const int64_t low = row * width + head + (halves ? j : 2 * j), high = low + (halves ? half : 1);
        expected[low] = Stored(product(x[low], c) + product(-x[high], s), kind.precision);
        expected[high] = Stored(product(x[high], c) + product(x[low], s), kind.precision);
      }
    }
  }
  const std::string variant = std::string(halves ? " of halves" : " of neighbours") + (back ? ", back" : "");
  test::ExpectBounded(
      "Rotary" + variant + ", heads of " + std::to_string(layout.head_size) + ", " + std::to_string(2 * half) + " turned", kind,
      y, expected);
}

TEST(RotaryTest, NarrowStorageWithinItsBounds) {
  struct Case {
    QkvLayout layout;
    int64_t half;
  };
  for (const Kind& kind : test::NarrowKinds()) {
    for (const Case& c : {Case{{1, 1, 2}, 1}, Case{{4, 2, 7}, 3}, Case{{4, 2, 10}, 5}, Case{{3, 3, 33}, 16}, Case{{8, 2, 64}, 32},
                          Case{{6, 3, 66, 5}, 32}, Case{{5, 1, 128}, 64}, Case{{2, 1, 96, 40}, 24}, Case{{4, 2, 64, 20}, 32},
                          Case{{2, 2, 264}, 132}}) {
      for (const auto pairs : {RotaryPairs::kHalves, RotaryPairs::kInterleaved}) {
        for (const auto direction : {RotaryDirection::kForward, RotaryDirection::kBackward})
          CheckNarrow(kind, c.layout, c.half, pairs, direction);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
