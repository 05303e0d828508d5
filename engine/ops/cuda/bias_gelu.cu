#include "engine/ops/bias_gelu.h"

#include "engine/ops/cuda/gelu.h"

namespace mbridge::cuda {
namespace {

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
    WithGelu<T>(kind, [&]<class Gelu>(Gelu) {
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
