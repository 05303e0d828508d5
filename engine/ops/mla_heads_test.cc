#include "engine/ops/mla_heads.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

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

}  // namespace
}  // namespace mbridge
