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

}  // namespace mbridge::cuda
