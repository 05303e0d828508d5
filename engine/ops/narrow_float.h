// Rounding to small floating-point formats, the same on the host and in kernels.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MB_HOST_DEVICE __host__ __device__
#else
#define MB_HOST_DEVICE
#endif

namespace mbridge {

// Without infinities: what is too large becomes the largest value.
struct NarrowFloat {
  int mantissa_bits;
  int smallest_exponent;  // Of a normal number.
  float largest;
};

inline constexpr NarrowFloat kE4M3Float{3, -6, 448.0f};
inline constexpr NarrowFloat kE5M2Float{2, -14, 57344.0f};
inline constexpr NarrowFloat kE2M1Float{1, 0, 6.0f};

// A power of two whose exponent a float of normal size has.
MB_HOST_DEVICE inline float PowerOfTwo(int exponent) { return ldexpf(1.0f, exponent); }

// Distance of the format's neighbours at x.
MB_HOST_DEVICE inline float SpacingAt(float magnitude, NarrowFloat format) {
  const int exponent = magnitude > 0.0f ? ilogbf(magnitude) : format.smallest_exponent;
  return PowerOfTwo((exponent > format.smallest_exponent ? exponent : format.smallest_exponent) - format.mantissa_bits);
}

// To the nearest, ties to even; NaN stays.
MB_HOST_DEVICE inline float RoundTo(float x, NarrowFloat format) {
  const float magnitude = fabsf(x);
  if (magnitude >= format.largest) return copysignf(format.largest, x);
  if (!(magnitude > 0.0f)) return x;
  const float spacing = SpacingAt(magnitude, format), rounded = rintf(magnitude / spacing) * spacing;
  return copysignf(rounded < format.largest ? rounded : format.largest, x);
}

// Up or down, so that the mean over draws `uniform` in [0, 1) is x.
MB_HOST_DEVICE inline float RoundStochastically(float x, NarrowFloat format, float uniform) {
  const float magnitude = fabsf(x);
  if (magnitude >= format.largest) return copysignf(format.largest, x);
  if (!(magnitude > 0.0f)) return x;
  const float spacing = SpacingAt(magnitude, format), rounded = floorf(magnitude / spacing + uniform) * spacing;
  return copysignf(rounded < format.largest ? rounded : format.largest, x);
}

// In [0, 1), from a counter: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
MB_HOST_DEVICE inline float UniformAt(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<float>(z >> 40) * (1.0f / 16777216.0f);
}

}  // namespace mbridge
