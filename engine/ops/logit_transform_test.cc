#include "engine/ops/logit_transform.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kCols = 19, kStride = 24;

double Reference(double x, const LogitTransform& t) {
  return t.soft_cap == 0 ? t.scale * x : t.soft_cap * std::tanh(t.scale * x / t.soft_cap);
}

void Check(const Kind& kind, const LogitTransform& transform) {
  const Values x = test::RandomValues(kRows * kStride, 1, 6.0, kind.precision),
               dy = test::RandomValues(kRows * kStride, 2, 1.0, kind.precision);
  const Owned logits(kind.storage, {kRows, kStride}, x), gradient(kind.storage, {kRows, kStride}, dy);
  const Matrix window = ColumnsOf(AsMatrix(logits), 0, kCols);
  TransformLogits({}, window, transform, kind.precision);
  TransformLogitsBackward({}, window, transform, kind.precision, ColumnsOf(AsMatrix(gradient), 0, kCols));
  Values expected = x, slope = dy;
  for (int64_t i = 0; i < kRows * kStride; ++i) {
    if (i % kStride >= kCols) continue;  // Outside of the window nothing changes.
    expected[i] = Reference(x[i], transform);
    slope[i] *= (Reference(x[i] + 1e-5, transform) - Reference(x[i] - 1e-5, transform)) / 2e-5;
  }
  test::ExpectNear(logits.ToValues(), expected, kind.epsilon(), 1e-6);
  // The slope is that of the rounded value.
  test::ExpectNear(gradient.ToValues(), slope, kind.epsilon(), transform.soft_cap == 0 ? 1e-6 : 3 * kind.epsilon());
}

TEST(LogitTransformTest, ForwardAndBackward) {
  for (const Kind& kind : test::kKinds) {
    for (const LogitTransform& transform :
         {LogitTransform{0.125f, 0.0f}, LogitTransform{1.0f, 3.0f}, LogitTransform{0.5f, 30.0f}})
      Check(kind, transform);
  }
}

// As in the output layer with Megatron-LM's fused loss: compact logits, gradients in F32 storage.
TEST(LogitTransformTest, DtypesMayDiffer) {
  const LogitTransform transform{1.0f, 3.0f};
  const Owned logits(DType::kBF16, {1, 2}, {1.5, -2.0}), gradient(DType::kF32, {1, 2}, {1.0, 2.0});
  TransformLogitsBackward({}, AsMatrix(logits), transform, DType::kF32, AsMatrix(gradient));
  test::ExpectNear(gradient.ToValues(), {0.75, 2.0 * (1 - 4.0 / 9)}, 1e-6, 0);
}

TEST(LogitTransformTest, RefusesShapesThatDiffer) {
  const Owned logits(DType::kF32, {2, 3}), gradient(DType::kF32, {3, 2});
  EXPECT_THROW(TransformLogitsBackward({}, AsMatrix(logits), {}, DType::kF32, AsMatrix(gradient)), EngineError);
}

void CheckNarrow(const Kind& kind, const LogitTransform& transform, int64_t rows, int64_t n) {
  const int64_t stride = n + 5;  // The last columns stay.
  const Values x = test::RandomValues(rows * stride, 1, 6.0, kind.precision),
               dy = test::RandomValues(rows * stride, 2, 1.0, kind.precision);
  const Owned logits(kind.storage, {rows, stride}, x), gradient(kind.storage, {rows, stride}, dy);
  TransformLogits({}, ColumnsOf(AsMatrix(logits), 0, n), transform, kind.precision);
  TransformLogitsBackward({}, ColumnsOf(AsMatrix(logits), 0, n), transform, kind.precision, ColumnsOf(AsMatrix(gradient), 0, n));
  Bounds expected(x.begin(), x.end()), expected_gradient(dy.begin(), dy.end());
  for (int64_t i = 0; i < rows * stride; ++i) {
    if (i % stride >= n) continue;
    const bool capped = transform.soft_cap != 0;
    const Bounded cap = transform.soft_cap, scaled = Bounded(x[i]) * transform.scale;
    const Bounded t = capped ? logits[i] / cap : Bounded(0);  // The slope is that of the rounded value.
    expected[i] = Stored(capped ? cap * Tanh(scaled / cap) : scaled, kind.precision);
    expected_gradient[i] = Stored(Bounded(dy[i]) * transform.scale * (1 - t * t), kind.precision);
  }
  const std::string variant = transform.soft_cap == 0 ? "" : ", soft cap";
  test::ExpectBounded("TransformLogits" + variant, kind, logits, expected);
  test::ExpectBounded("TransformLogitsBackward" + variant, kind, gradient, expected_gradient);
}

TEST(LogitTransformTest, NarrowStorageWithinItsBounds) {
  for (const Kind& kind : test::NarrowKinds()) {
    for (const LogitTransform& transform :
         {LogitTransform{0.125f, 0.0f}, LogitTransform{1.0f, 3.0f}, LogitTransform{0.5f, 30.0f}}) {
      for (const auto& [rows, n] : test::kAwkwardShapes) CheckNarrow(kind, transform, rows, n);
    }
  }
}

}  // namespace
}  // namespace mbridge
