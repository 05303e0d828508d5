// Single-precision functions in forms that compilers vectorise (no calls, no branches). Polynomials: Moshier's Cephes library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace mbridge::cpu {

// About 1 ulp; results below 1.2e-38 become about that number; NaN stays NaN.
inline float Exp(float x) {
  x = x > 88.3f ? 88.3f : x;
  x = x < -87.3f ? -87.3f : x;
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23.
  const float shifted = std::fma(x, 1.44269504f, kRoundToInteger);
  const float n = shifted - kRoundToInteger;
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p, r * r, r) + 1.0f;
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) - 0x4B400000u + 127u) << 23;
  return p * std::bit_cast<float>(power);
}

// 1 / (1 + exp(-x)).
inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// Relative error below 3e-7.
inline float Tanh(float x) {
  const float a = std::fabs(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = std::fma(p, z, 2.06390887954e-2f);
  p = std::fma(p, z, -5.37397155531e-2f);
  p = std::fma(p, z, 1.33314422036e-1f);
  p = std::fma(p, z, -3.33332819422e-1f);
  const float near = std::fma(p * z, x, x);  // |x| < 0.625.
  const float far = std::copysign(1.0f - 2.0f / (Exp(2.0f * a) + 1.0f), x);
  return a < 0.625f ? near : far;
}

// Absolute error below 2e-7.
inline float Erf(float x) {
  const float a = std::fabs(x), z = x * x;
  float t = 7.853861353153693e-5f;
  t = std::fma(t, z, -8.010193625184903e-4f);
  t = std::fma(t, z, 5.188327685732524e-3f);
  t = std::fma(t, z, -2.685381193529856e-2f);
  t = std::fma(t, z, 1.128358514861418e-1f);
  t = std::fma(t, z, -3.761262582423300e-1f);
  t = std::fma(t, z, 1.128379165726710f);
  const float near = x * t;  // |x| < 1.
  const float q = 1.0f / (a > 1.0f ? a : 1.0f), y = q * q;
  float p = 2.326819970068386e-2f;
  p = std::fma(p, y, -1.387039388740657e-1f);
  p = std::fma(p, y, 3.687424674597105e-1f);
  p = std::fma(p, y, -5.824733027278666e-1f);
  p = std::fma(p, y, 6.210004621745983e-1f);
  p = std::fma(p, y, -4.944515323274145e-1f);
  p = std::fma(p, y, 3.404879937665872e-1f);
  p = std::fma(p, y, -2.741127028184656e-1f);
  p = std::fma(p, y, 5.638259427386472e-1f);
  float r = -1.047766399936249e+1f;
  r = std::fma(r, y, 1.297719955372516e+1f);
  r = std::fma(r, y, -7.495518717768503e+0f);
  r = std::fma(r, y, 2.921019019210786e+0f);
  r = std::fma(r, y, -1.015265279202700e+0f);
  r = std::fma(r, y, 4.218463358204948e-1f);
  r = std::fma(r, y, -2.820767439740514e-1f);
  r = std::fma(r, y, 5.641895067754075e-1f);
  const float far = std::copysign(1.0f - Exp(-z) * q * (a < 2.0f ? p : r), x);
  return a < 1.0f ? near : far;
}

}  // namespace mbridge::cpu
