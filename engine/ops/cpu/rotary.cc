#include "engine/ops/rotary.h"

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

template <class P, RotaryPairs kPairs>
void TurnHead(typename P::Storage* head, const float* cosine, const float* sine, float sign, int64_t half) {
#pragma omp simd
  for (int64_t j = 0; j < half; ++j) {
    const int64_t first = kPairs == RotaryPairs::kHalves ? j : 2 * j,
                  second = kPairs == RotaryPairs::kHalves ? j + half : 2 * j + 1;
    const float lo = P::Load(head[first]), hi = P::Load(head[second]), c = cosine[j], s = sign * sine[j];
    head[first] = P::Store(P::Round(lo * c) + P::Round(-hi * s));
    head[second] = P::Store(P::Round(hi * c) + P::Round(lo * s));
  }
}

void RotaryCpu(const Context&, const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const QkvLayout& layout,
               RotaryPairs pairs, RotaryDirection direction, DType precision) {
  const int64_t s = qkv.shape[0], b = qkv.shape[1], width = layout.width(), half = cosine.shape[1];
  if (qkv.shape[2] != width || cosine.shape[0] != s || 2 * half > layout.head_size) {
    ThrowEngineError("rotary tables {} for {} with heads of {}", cosine.shape.ToString(), qkv.shape.ToString(), layout.head_size);
  }
  const float sign = direction == RotaryDirection::kForward ? 1.0f : -1.0f;
  cpu::WithPrecision(qkv.dtype, precision, [&]<class P>(P) {
    auto* values = qkv.as<typename P::Storage>();
    const float *c = cosine.as<float>(), *n = sine.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s * b; ++i) {
      auto* row = values + i * width;
      const float *row_c = c + i / b * half, *row_s = n + i / b * half;
      const auto turn = [&](int64_t column) {
        if (pairs == RotaryPairs::kHalves) return TurnHead<P, RotaryPairs::kHalves>(row + column, row_c, row_s, sign, half);
        TurnHead<P, RotaryPairs::kInterleaved>(row + column, row_c, row_s, sign, half);
      };
      for (int64_t head = 0; head < layout.heads; ++head) turn(layout.query_column(head));
      for (int64_t group = 0; group < layout.groups; ++group) turn(layout.key_column(group));
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const QkvLayout&, RotaryPairs, RotaryDirection, DType)>
    Rotary{&RotaryCpu};

}  // namespace mbridge
