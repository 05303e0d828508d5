// GELU and its slope.
#pragma once

#include "engine/ops/cpu/vector_math.h"

namespace mbridge::cpu {

// The tanh approximation; the constants are those of Megatron-LM's text, not exact ones.
struct TanhGelu {
  // 0.5 (1 + tanh(a)) = sigmoid(2a), which keeps its accuracy for large negative a.
  static float Half(float u) { return Sigmoid(2.0f * (0.79788456f * u * (1.0f + 0.044715f * u * u))); }
  static float Value(float u) { return u * Half(u); }
  static float Slope(float u) {
    const float half = Half(u);
    const float one_minus_square = 4.0f * half * (1.0f - half);  // 1 - tanh^2.
    return 0.5f * u * one_minus_square * (0.79788456f + 0.1070322243f * u * u) + half;
  }
};

struct ErfGelu {
  static float Half(float u) { return 0.5f * (1.0f + Erf(u * 0.70710678f)); }
  static float Value(float u) { return u * Half(u); }
  static float Slope(float u) { return Half(u) + u * (0.39894228f * Exp(-0.5f * u * u)); }
};

}  // namespace mbridge::cpu
