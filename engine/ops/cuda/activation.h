// Activations of the first MLP layer, with its bias: one value from one.
#pragma once

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {

// Activation: Value(u), Slope(u), and kRoundSum: whether u = x + bias is rounded.
template <class T, int kWidth, class Activation, bool kBackward> struct ActivationBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> x;
    Pack<T, kBackward ? kN : 1> dy;
  };
  struct Bias {
    float values[kN];
  };
  const T *x, *bias, *dy;
  T* out;
  int64_t n;

  __device__ Bias Columns(int64_t column) const {
    Bias b = {};
    if (bias != nullptr) LoadFloats<kN>(bias + column, b.values);
    return b;
  }
  __device__ Row Load(int64_t row, int64_t column) const {
    Row loaded;
    loaded.x = LoadPack<kN>(x + row * n + column);
    if constexpr (kBackward) loaded.dy = LoadPack<kN>(dy + row * n + column);
    return loaded;
  }
  __device__ void Finish(const Bias& b, const Row& loaded, int64_t row, int64_t column) const {
    float u[kN], result[kN];
    Unpack(loaded.x, u);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      u[i] += b.values[i];
      if constexpr (Activation::kRoundSum) u[i] = Round<T>(u[i]);
    }
    if constexpr (kBackward) {
      float d[kN];
      Unpack(loaded.dy, d);
#pragma unroll
      for (int i = 0; i < kN; ++i) result[i] = Activation::Slope(u[i]) * d[i];
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) result[i] = Activation::Value(u[i]);
    }
    StoreFloats<kN>(out + row * n + column, result);
  }
};

template <class T, class Activation, bool kBackward>
void LaunchActivation(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, const Tensor& out) {
  const int64_t n = LastDimension(x), rows = x.size() / n;
  const T *in = PointerOf<T>(x), *b = PointerOf<T>(bias), *g = PointerOf<T>(dy);
  T* to = PointerOf<T>(out);
  constexpr int kRows = kBackward ? 2 : 4;  // Four loads of 16 bytes in flight.
  if (n % kVectorSize<T> == 0 && AreAligned16(in, b, g, to)) {
    LaunchRows<kRows>(context, ActivationBody<T, kVectorSize<T>, Activation, kBackward>{in, b, g, to, n}, rows, n);
  } else {
    LaunchRows<kRows>(context, ActivationBody<T, 1, Activation, kBackward>{in, b, g, to, n}, rows, n);
  }
}

}  // namespace mbridge::cuda
