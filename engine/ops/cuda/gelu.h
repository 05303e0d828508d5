// GELU and its slope.
#pragma once

#include "engine/ops/bias_gelu.h"
#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {

// The constants are those of Megatron-LM's text, as in the CPU twin.
template <class T, bool kRound> struct Tanh {
  static constexpr bool kRoundSum = kRound;
  // 0.5 (1 + tanh(a)) = sigmoid(2a).
  static __device__ float Half(float u) { return Sigmoid<T>(2.0f * (0.79788456f * u * (1.0f + 0.044715f * u * u))); }
  static __device__ float Value(float u) { return u * Half(u); }
  static __device__ float Slope(float u) {
    const float half = Half(u);
    const float one_minus_square = 4.0f * half * (1.0f - half);
    return 0.5f * u * one_minus_square * (0.79788456f + 0.1070322243f * u * u) + half;
  }
};

template <class T, bool kRound> struct ExactErf {
  static constexpr bool kRoundSum = kRound;
  static __device__ float Half(float u) { return 0.5f * (1.0f + erff(u * 0.70710678f)); }
  static __device__ float Value(float u) { return u * Half(u); }
  static __device__ float Slope(float u) {
    const float bell = std::is_same_v<T, float> ? expf(-0.5f * u * u) : __expf(-0.5f * u * u);
    return Half(u) + u * (0.39894228f * bell);
  }
};

// f(Gelu).
template <class T, class F> void WithGelu(GeluKind kind, F&& f) {
  switch (kind) {
    case GeluKind::kTanhFused: return f(Tanh<T, false>());
    case GeluKind::kTanh: return f(Tanh<T, true>());
    case GeluKind::kErf: return f(ExactErf<T, true>());
    case GeluKind::kErfFused: return f(ExactErf<T, false>());
  }
}

}  // namespace mbridge::cuda
