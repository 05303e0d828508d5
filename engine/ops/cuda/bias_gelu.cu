#include "engine/ops/bias_gelu.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

// The constants are those of Megatron-LM's text, as in the CPU twin.
template <class T> struct Tanh {
  static constexpr bool kRoundSum = false;
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
template <class T, class F> void WithKind(GeluKind kind, F&& f) {
  switch (kind) {
    case GeluKind::kTanhFused: return f(Tanh<T>());
    case GeluKind::kErf: return f(ExactErf<T, true>());
    case GeluKind::kErfFused: return f(ExactErf<T, false>());
  }
}

template <class T, int kWidth, class Gelu, bool kBackward> struct Body {
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
      if constexpr (Gelu::kRoundSum) u[i] = Round<T>(u[i]);
    }
    if constexpr (kBackward) {
      float d[kN];
      Unpack(loaded.dy, d);
#pragma unroll
      for (int i = 0; i < kN; ++i) result[i] = Gelu::Slope(u[i]) * d[i];
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) result[i] = Gelu::Value(u[i]);
    }
    StoreFloats<kN>(out + row * n + column, result);
  }
};

template <bool kBackward>
void Run(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
         const Tensor& out) {
  CheckStorage(x, precision);
  const int64_t n = LastDimension(x), rows = x.size() / n;
  WithType(x.dtype, [&]<class T>(T) {
    WithKind<T>(kind, [&]<class Gelu>(Gelu) {
      const T *in = PointerOf<T>(x), *b = PointerOf<T>(bias), *g = PointerOf<T>(dy);
      T* to = PointerOf<T>(out);
      if (n % kVectorSize<T> == 0 && AreAligned16(in, b, g, to)) {
        LaunchRows<2>(context, Body<T, kVectorSize<T>, Gelu, kBackward>{in, b, g, to, n}, rows, n);
      } else {
        LaunchRows<2>(context, Body<T, 1, Gelu, kBackward>{in, b, g, to, n}, rows, n);
      }
    });
  });
}

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y) {
  Run<false>(context, {}, x, bias, kind, precision, y);
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
                  const Tensor& dx) {
  Run<true>(context, dy, x, bias, kind, precision, dx);
}

const bool g_registered = (BiasGeluForward.cuda = &ForwardCuda, BiasGeluBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
