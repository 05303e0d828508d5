// Running maximum and sum of exponentials of a row.
#pragma once

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {

// exp, to the last bits for F32 values; for values of a 16-bit type the fast one (relative error 2^-22 and 2^-24 |x|).
template <class T> __device__ __forceinline__ float ExpFor(float x) {
  if constexpr (std::is_same_v<T, float>) return expf(x);
  return __expf(x);
}

// `T` says how exact the exponentials are.
template <class T> struct OnlineSoftmax {
  float maximum = -INFINITY, sum = 0.0f;

  template <int kN> __device__ __forceinline__ void Add(const float (&z)[kN]) {
    float largest = z[0];
#pragma unroll
    for (int i = 1; i < kN; ++i) largest = fmaxf(largest, z[i]);
    if (largest > maximum) {
      sum *= ExpFor<T>(maximum - largest);
      maximum = largest;
    }
    float added = ExpFor<T>(z[0] - maximum);
#pragma unroll
    for (int i = 1; i < kN; ++i) added += ExpFor<T>(z[i] - maximum);
    sum += added;
  }
  // The block's, in every thread.
  __device__ __forceinline__ void Join(float* shared) {
    const float largest = BlockMax(maximum, shared);
    sum = BlockSum(maximum == largest ? sum : sum * ExpFor<T>(maximum - largest), shared);
    maximum = largest;
  }
};

// The same for values of a 16-bit type in few instructions: powers of two of what one multiply-add makes of a value.
struct FastOnlineSoftmax {
  static constexpr float kLog2E = 1.44269504f;
  float maximum = -INFINITY, sum = 0.0f;

  // exp(x - largest) for x near or below it; 0 where that is subnormal. `scaled`: largest * kLog2E.
  static __device__ __forceinline__ float Power(float x, float scaled) { return Exp2(__fmaf_rn(x, kLog2E, -scaled)); }

  template <int kN> __device__ __forceinline__ void Add(const float (&z)[kN]) {
    float largest = z[0];
#pragma unroll
    for (int i = 1; i < kN; ++i) largest = fmaxf(largest, z[i]);
    if (largest > maximum) {
      sum *= Exp2((maximum - largest) * kLog2E);
      maximum = largest;
    }
    const float scaled = maximum * kLog2E;
    float added = Power(z[0], scaled);
#pragma unroll
    for (int i = 1; i < kN; ++i) added += Power(z[i], scaled);
    sum += added;
  }
  // Takes in another part's.
  __device__ __forceinline__ void Join(float other_maximum, float other_sum) {
    const float largest = fmaxf(maximum, other_maximum);
    if (largest == -INFINITY) return;
    sum = sum * Exp2((maximum - largest) * kLog2E) + other_sum * Exp2((other_maximum - largest) * kLog2E);
    maximum = largest;
  }
  // The warp's, in every thread.
  __device__ __forceinline__ void JoinWarp() {
    const float largest = WarpMax(maximum);
    sum = WarpSum(maximum == largest ? sum : sum * Exp2((maximum - largest) * kLog2E));
    maximum = largest;
  }

 private:
  static __device__ __forceinline__ float Exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

}  // namespace mbridge::cuda
