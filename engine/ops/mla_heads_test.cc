#include "engine/ops/mla_heads.h"

#include <algorithm>
#include <array>

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kSteps = 3, kBatch = 2, kRows = kSteps * kBatch, kLatent = 5;
constexpr MlaLayout kLayout{.heads = 3, .plain_size = 4, .turned_size = 6, .value_size = 7};
constexpr int64_t kHalf = 2;  // The last two elements of a turned part stay.

struct Inputs {
  Values query, key_value, down;
};

Values Angles(bool sine) {
  Values table;
  for (int64_t i = 0; i < kSteps * kHalf; ++i) table.push_back(test::RoundTo(DType::kBF16, sine ? std::sin(i) : std::cos(i)));
  return table;
}

Values Turned(const double* from, int64_t row, RotaryPairs pairs) {
  const Values c = Angles(false), s = Angles(true);
  Values to(from, from + kLayout.turned_size);
  for (int64_t j = 0; j < kHalf; ++j) {
    const int64_t lo = pairs == RotaryPairs::kInterleaved ? 2 * j : j,
                  hi = pairs == RotaryPairs::kInterleaved ? lo + 1 : lo + kHalf;
    const int64_t at = row / kBatch * kHalf + j;
    to[lo] = from[lo] * c[at] - from[hi] * s[at];
    to[hi] = from[hi] * c[at] + from[lo] * s[at];
  }
  return to;
}

Values Reference(const Inputs& in, RotaryPairs pairs) {
  Values out;
  const auto append = [&out](const double* from, int64_t count) { out.insert(out.end(), from, from + count); };
  for (int64_t row = 0; row < kRows; ++row) {
    const Values shared = Turned(&in.down[row * (kLatent + kLayout.turned_size) + kLatent], row, pairs);
    for (int64_t head = 0; head < kLayout.heads; ++head) {
      const double* q = &in.query[row * kLayout.query_width() + head * (kLayout.plain_size + kLayout.turned_size)];
      const double* kv = &in.key_value[row * kLayout.key_value_width() + head * (kLayout.plain_size + kLayout.value_size)];
      append(q, kLayout.plain_size);
      append(Turned(q + kLayout.plain_size, row, pairs).data(), kLayout.turned_size);
      append(kv, kLayout.plain_size);
      append(shared.data(), kLayout.turned_size);
      append(kv + kLayout.plain_size, kLayout.value_size);
    }
  }
  return out;
}

TEST(MlaHeadsTest, JoinAndSplit) {
  const int64_t down_width = kLatent + kLayout.turned_size, width = kLayout.qkv().width();
  const Owned cosine(DType::kF32, {kSteps, kHalf}, Angles(false)), sine(DType::kF32, {kSteps, kHalf}, Angles(true));
  for (const Kind& kind : test::kKinds) {
    for (const RotaryPairs pairs : {RotaryPairs::kHalves, RotaryPairs::kInterleaved}) {
      const Inputs in{test::RandomValues(kRows * kLayout.query_width(), 1, 1.0, kind.precision),
                      test::RandomValues(kRows * kLayout.key_value_width(), 2, 1.0, kind.precision),
                      test::RandomValues(kRows * down_width, 3, 1.0, kind.precision)};
      const Values d = test::RandomValues(kRows * width, 4, 1.0, kind.precision);
      const auto owned = [&](int64_t columns, const Values& values) {
        return Owned(kind.storage, {kSteps, kBatch, columns}, values);
      };
      const Owned qkv(kind.storage, {kSteps, kBatch, width});
      MlaJoinHeads({}, owned(kLayout.query_width(), in.query), owned(kLayout.key_value_width(), in.key_value),
                   owned(down_width, in.down), cosine, sine, kLayout, pairs, kind.precision, qkv);
      test::ExpectNear(qkv.ToValues(), Reference(in, pairs), 2 * kind.epsilon(), 2 * kind.epsilon());

      const Owned d_query = owned(kLayout.query_width(), Values(in.query.size())),
                  d_key_value = owned(kLayout.key_value_width(), Values(in.key_value.size())),
                  d_down = owned(down_width, Values(in.down.size(), 1.0));
      MlaSplitHeads({}, owned(width, d), cosine, sine, kLayout, pairs, kind.precision, d_query, d_key_value, d_down);
      // NOLINTNEXTLINE(performance-unnecessary-value-param): it is changed through `moved`.
      const auto loss = [&](Inputs inputs, Values Inputs::*moved, const Values& values) {
        inputs.*moved = values;
        return test::Dot(Reference(inputs, pairs), d);
      };
      const auto expect = [&](const Owned& actual, Values Inputs::*moved) {
        Values slope = test::NumericGradient(in.*moved, [&](const Values& v) { return loss(in, moved, v); });
        if (moved == &Inputs::down) {  // The latent columns are not touched.
          for (size_t i = 0; i < slope.size(); ++i) slope[i] = i % down_width < kLatent ? 1.0 : slope[i];
        }
        test::ExpectNear(actual.ToValues(), slope, 4 * kind.epsilon(), 4 * kind.epsilon());
      };
      expect(d_query, &Inputs::query);
      expect(d_key_value, &Inputs::key_value);
      expect(d_down, &Inputs::down);
    }
  }
}

TEST(MlaHeadsTest, CopiesColumns) {
  const Owned from(DType::kF32, {2, 3}, {1, 2, 3, 4, 5, 6}), to(DType::kF32, {2, 4});
  CopyColumns({}, from, 1, to, 0, 2, DType::kF32);
  EXPECT_EQ(to.ToValues(), (Values{2, 3, 0, 0, 5, 6, 0, 0}));
  EXPECT_THROW(CopyColumns({}, from, 2, to, 0, 2, DType::kF32), EngineError);
}

struct NarrowCase {
  MlaLayout layout;
  int64_t half;
};

// A turned part by the header's formula: its first 2 half elements in pairs, the others stay.
Bounds Turned(const Bounds& from, const double* cosine, const double* sine, double sign, int64_t half, RotaryPairs pairs,
              DType precision) {
  Bounds to = from;
  const auto product = [&](const Bounded& a, double b) { return Stored(a * b, precision); };
  for (int64_t j = 0; j < half; ++j) {
    const int64_t lo = pairs == RotaryPairs::kInterleaved ? 2 * j : j,
                  hi = pairs == RotaryPairs::kInterleaved ? lo + 1 : lo + half;
    const double c = cosine[j], s = sign * sine[j];
    to[lo] = Stored(product(from[lo], c) + product(-from[hi], s), precision);
    to[hi] = Stored(product(from[hi], c) + product(from[lo], s), precision);
  }
  return to;
}

void CheckNarrow(const Kind& kind, const NarrowCase& c, RotaryPairs pairs) {
  constexpr int64_t s = 5, b = 3, latent = 5;
  const MlaLayout& o = c.layout;
  const QkvLayout layout = o.qkv();
  const int64_t key = o.plain_size + o.turned_size, down_width = latent + o.turned_size;
  const auto random = [&](int64_t count, uint32_t seed) { return test::RandomValues(count, seed, 1.0, kind.precision); };
  const Values query = random(s * b * o.query_width(), 1), key_value = random(s * b * o.key_value_width(), 2),
               down = random(s * b * down_width, 3), d = random(s * b * layout.width(), 4), cosine = random(s * c.half, 5),
               sine = random(s * c.half, 6);
  const Owned cosines(DType::kF32, {s, c.half}, cosine), sines(DType::kF32, {s, c.half}, sine);
  const auto owned = [&](int64_t columns, const Values& values) { return Owned(kind.storage, {s, b, columns}, values); };
  const Owned qkv(kind.storage, {s, b, layout.width()}), d_query(kind.storage, {s, b, o.query_width()}),
      d_key_value(kind.storage, {s, b, o.key_value_width()}), d_down = owned(down_width, down);
  MlaJoinHeads({}, owned(o.query_width(), query), owned(o.key_value_width(), key_value), owned(down_width, down), cosines, sines,
               o, pairs, kind.precision, qkv);
  MlaSplitHeads({}, owned(layout.width(), d), cosines, sines, o, pairs, kind.precision, d_query, d_key_value, d_down);

  Bounds joined(d.size()), of_query(query.size()), of_key_value(key_value.size()), of_down(down.begin(), down.end());
  for (int64_t row = 0; row < s * b; ++row) {
    const auto turn = [&](const Bounds& from, double sign) {
      const int64_t table = row / b * c.half;
      return Turned(from, &cosine[table], &sine[table], sign, c.half, pairs, kind.precision);
    };
    const auto part = [](const Values& from, int64_t begin, int64_t count) {
      return Bounds(from.begin() + begin, from.begin() + begin + count);
    };
    const auto put = [](const Bounds& values, int64_t begin, Bounds* to) {
      std::copy(values.begin(), values.end(), to->begin() + begin);
    };
    const int64_t shared = row * down_width + latent;
    std::vector<test::Sum> sums(o.turned_size);
    for (int64_t head = 0; head < o.heads; ++head) {
      const int64_t q = row * o.query_width() + head * key, kv = row * o.key_value_width() + head * (o.plain_size + o.value_size);
      const int64_t to_q = row * layout.width() + layout.query_column(head),
                    to_k = row * layout.width() + layout.key_column(head),
                    to_v = row * layout.width() + layout.value_column(head);
      put(part(query, q, o.plain_size), to_q, &joined);
      put(turn(part(query, q + o.plain_size, o.turned_size), 1), to_q + o.plain_size, &joined);
      put(part(key_value, kv, o.plain_size), to_k, &joined);
      put(turn(part(down, shared, o.turned_size), 1), to_k + o.plain_size, &joined);
      put(part(key_value, kv + o.plain_size, o.value_size), to_v, &joined);

      put(part(d, to_q, o.plain_size), q, &of_query);
      put(turn(part(d, to_q + o.plain_size, o.turned_size), -1), q + o.plain_size, &of_query);
      put(part(d, to_k, o.plain_size), kv, &of_key_value);
      put(part(d, to_v, o.value_size), kv + o.plain_size, &of_key_value);
      for (int64_t j = 0; j < o.turned_size; ++j) sums[j].Add(d[to_k + o.plain_size + j]);
    }
    Bounds of_shared;
    for (const test::Sum& sum : sums) of_shared.push_back(Stored(sum.Total(), kind.precision));
    put(turn(of_shared, -1), shared, &of_down);
  }
  const std::string variant = std::string(pairs == RotaryPairs::kHalves ? ", halves" : ", neighbours") + ", " +
                              std::to_string(o.heads) + " heads of " + std::to_string(o.plain_size) + " + " +
                              std::to_string(o.turned_size);
  test::ExpectBounded("MlaJoinHeads" + variant, kind, qkv, joined);
  test::ExpectBounded("MlaSplitHeads' d_query" + variant, kind, d_query, of_query);
  test::ExpectBounded("MlaSplitHeads' d_key_value" + variant, kind, d_key_value, of_key_value);
  test::ExpectBounded("MlaSplitHeads' d_down" + variant, kind, d_down, of_down);
}

TEST(MlaHeadsTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const NarrowCase& c : {NarrowCase{{1, 1, 2, 1}, 1}, NarrowCase{{3, 4, 6, 7}, 2}, NarrowCase{{5, 33, 66, 17}, 32},
                                NarrowCase{{3, 128, 64, 128}, 32}, NarrowCase{{33, 8, 8, 24}, 4}}) {
      for (const RotaryPairs pairs : {RotaryPairs::kHalves, RotaryPairs::kInterleaved}) CheckNarrow(kind, c, pairs);
    }
  }
}

TEST(MlaHeadsTest, CopiesColumnsOfNarrowStorage) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const auto& [from_begin, to_begin, count] : {std::array<int64_t, 3>{0, 0, 1}, {1, 2, 33}, {8, 16, 264}, {3, 0, 2047}}) {
      constexpr int64_t rows = 5;
      const int64_t width = from_begin + count + 7, to_width = to_begin + count + 1;
      const Values x = test::RandomValues(rows * width, 1, 1.0, kind.precision);
      const Owned to(kind.storage, {rows, to_width}, Values(rows * to_width, 2.0));
      CopyColumns({}, Owned(kind.storage, {rows, width}, x), from_begin, to, to_begin, count, kind.precision);
      Bounds expected(rows * to_width, 2.0);
      for (int64_t i = 0; i < rows * count; ++i)
        expected[i / count * to_width + to_begin + i % count] = x[i / count * width + from_begin + i % count];
      test::ExpectBounded("CopyColumns", kind, to, expected);
    }
  }
}

}  // namespace
}  // namespace mbridge
