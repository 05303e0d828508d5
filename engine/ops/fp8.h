// The two 8-bit floats of Hopper and Blackwell as bytes: E4M3 (no infinity, largest 448) and E5M2 (largest finite 57344).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mbridge {

enum class Fp8Format : uint8_t { kE4M3, kE5M2 };

constexpr float LargestOf(Fp8Format format) { return format == Fp8Format::kE4M3 ? 448.0f : 57344.0f; }

// Round to nearest even; what is too large, infinity too, becomes the largest finite value; NaN stays NaN.
inline uint8_t ToFp8(float x, Fp8Format format) {
  const bool wide = format == Fp8Format::kE4M3;
  const int mantissa = wide ? 3 : 2, smallest_exponent = wide ? -6 : -14;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const uint8_t largest = wide ? 0x7e : 0x7b;
  const float magnitude = std::fabs(x);
  if (magnitude >= LargestOf(format)) return sign | largest;
  // The distance between neighbours is fixed below the smallest normal exponent.
  const int exponent = magnitude == 0.0f ? smallest_exponent : std::max(std::ilogb(magnitude), smallest_exponent);
  // At most 2^(mantissa + 1) steps, which may carry into the next exponent: the bits are numbered through.
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
  const int code = (exponent - smallest_exponent) * (1 << mantissa) + steps;
  return sign | static_cast<uint8_t>(std::min<int>(code, largest));
}

inline float FromFp8(uint8_t bits, Fp8Format format) {
  const bool wide = format == Fp8Format::kE4M3;
  const int mantissa = wide ? 3 : 2, smallest_exponent = wide ? -6 : -14;
  const int code = bits & 0x7f, exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
  float magnitude = exponent == 0
                        ? std::ldexp(static_cast<float>(fraction), smallest_exponent - mantissa)
                        : std::ldexp(static_cast<float>(fraction + (1 << mantissa)), exponent - 1 + smallest_exponent - mantissa);
  if (wide && code == 0x7f) magnitude = NAN;
  if (!wide && exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
  return bits & 0x80 ? -magnitude : magnitude;
}

}  // namespace mbridge
