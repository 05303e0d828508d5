// Gated activations of the first MLP layer: g(u1) u2 of the halves of each row.
#pragma once

#include "engine/ops/cuda/maximum.h"

namespace mbridge::cuda {

// kEager: sums, the gate and the product are rounded, as separate operations do; else only the end.
template <class T, int kWidth, class Gate, bool kEager, bool kBackward> struct GatedBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> gate, up;
    Pack<T, kBackward ? kN : 1> dy;
  };
  struct Bias {
    float gate[kN], up[kN];
  };
  const T *x, *bias, *dy;  // x [rows, 2 n], dy [rows, n].
  T* out;                  // y [rows, n] or dx [rows, 2 n].
  int64_t n;

  __device__ Bias Columns(int64_t column) const {
    Bias b = {};
    if (bias != nullptr) {
      LoadFloats<kN>(bias + column, b.gate);
      LoadFloats<kN>(bias + n + column, b.up);
    }
    return b;
  }
  __device__ Row Load(int64_t row, int64_t column) const {
    Row loaded;
    loaded.gate = LoadPack<kN>(x + row * 2 * n + column);
    loaded.up = LoadPack<kN>(x + row * 2 * n + n + column);
    if constexpr (kBackward) loaded.dy = LoadPack<kN>(dy + row * n + column);
    return loaded;
  }
  // Returns the largest magnitude of what it stores, before the rounding.
  __device__ float Finish(const Bias& b, const Row& loaded, int64_t row, int64_t column) const {
    float largest = 0.0f;
    float gate[kN], up[kN];
    Unpack(loaded.gate, gate);
    Unpack(loaded.up, up);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      gate[i] += b.gate[i];
      up[i] += b.up[i];
      if constexpr (kEager) {
        gate[i] = Round<T>(gate[i]);
        up[i] = Round<T>(up[i]);
      }
    }
    if constexpr (kBackward) {
      float d[kN], d_gate[kN], d_up[kN];
      Unpack(loaded.dy, d);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float value = Gate::Value(gate[i]), rounded = kEager ? Round<T>(value) : value;
        const float scaled = kEager ? Round<T>(d[i] * up[i]) : d[i] * up[i];
        d_gate[i] = scaled * Gate::Slope(gate[i]);
        d_up[i] = d[i] * rounded;
        largest = fmaxf(largest, fmaxf(fabsf(d_gate[i]), fabsf(d_up[i])));
      }
      StoreFloats<kN>(out + row * 2 * n + column, d_gate);
      StoreFloats<kN>(out + row * 2 * n + n + column, d_up);
    } else {
      float y[kN];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float value = Gate::Value(gate[i]);
        y[i] = (kEager ? Round<T>(value) : value) * up[i];
        largest = fmaxf(largest, fabsf(y[i]));
      }
      StoreFloats<kN>(out + row * n + column, y);
    }
    return largest;
  }
};

// forward: out [rows, n];  backward: out [rows, 2 n] from dy [rows, n]. maximum: null, or raised to the largest |out|.
template <class T, class Gate, bool kEager, bool kBackward>
void LaunchGated(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, const Tensor& out,
                 float* maximum = nullptr) {
  const int64_t n = LastDimension(x) / 2, rows = x.size() / (2 * n);
  const T *in = PointerOf<T>(x), *b = PointerOf<T>(bias), *g = PointerOf<T>(dy);
  T* to = PointerOf<T>(out);
  const auto launch = [&](const auto& body) {
    if (maximum == nullptr) return LaunchRows<2>(context, body, rows, n);
    LaunchRowsWithMaximum<T, 2>(context, body, rows, n, maximum);
  };
  if (n % kVectorSize<T> == 0 && AreAligned16(in, b, g, to)) {
    launch(GatedBody<T, kVectorSize<T>, Gate, kEager, kBackward>{in, b, g, to, n});
  } else {
    launch(GatedBody<T, 1, Gate, kEager, kBackward>{in, b, g, to, n});
  }
}

// `half`: y or dy.
inline void CheckGatedWidth(const Tensor& x, const Tensor& half) {
  if (x.size() != 2 * half.size()) ThrowEngineError("gated activation of {} and {}", x.shape.ToString(), half.shape.ToString());
}

}  // namespace mbridge::cuda
