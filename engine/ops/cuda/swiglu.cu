#include "engine/ops/swiglu.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

template <class T, int kWidth, bool kEager, bool kBackward> struct Body {
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
  __device__ void Finish(const Bias& b, const Row& loaded, int64_t row, int64_t column) const {
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
        const float s = Sigmoid<T>(gate[i]), slope = s * (1.0f + gate[i] * (1.0f - s));
        const float scaled = kEager ? Round<T>(d[i] * up[i]) : d[i] * up[i];
        const float silu = kEager ? Round<T>(gate[i] * s) : gate[i] * s;
        d_gate[i] = scaled * slope;
        d_up[i] = d[i] * silu;
      }
      StoreFloats<kN>(out + row * 2 * n + column, d_gate);
      StoreFloats<kN>(out + row * 2 * n + n + column, d_up);
    } else {
      float y[kN];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float silu = gate[i] * Sigmoid<T>(gate[i]);
        y[i] = (kEager ? Round<T>(silu) : silu) * up[i];
      }
      StoreFloats<kN>(out + row * n + column, y);
    }
  }
};

template <bool kBackward>
void Run(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
         const Tensor& out) {
  CheckStorage(x, precision);
  const int64_t n = LastDimension(x) / 2, rows = x.size() / (2 * n);
  const Tensor& half = kBackward ? dy : out;
  if (x.size() != 2 * half.size()) ThrowEngineError("gated activation of {} and {}", x.shape.ToString(), half.shape.ToString());
  WithType(x.dtype, [&]<class T>(T) {
    const T *in = PointerOf<T>(x), *b = PointerOf<T>(bias), *g = PointerOf<T>(dy);
    T* to = PointerOf<T>(out);
    const auto run = [&]<bool kEager>(std::bool_constant<kEager>) {
      if (n % kVectorSize<T> == 0 && AreAligned16(in, b, g, to)) {
        LaunchRows<2>(context, Body<T, kVectorSize<T>, kEager, kBackward>{in, b, g, to, n}, rows, n);
      } else {
        LaunchRows<2>(context, Body<T, 1, kEager, kBackward>{in, b, g, to, n}, rows, n);
      }
    };
    kind == SwiGluKind::kEager ? run(std::true_type()) : run(std::false_type());
  });
}

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision, const Tensor& y) {
  Run<false>(context, {}, x, bias, kind, precision, y);
}

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, SwiGluKind kind, DType precision,
                  const Tensor& dx) {
  Run<true>(context, dy, x, bias, kind, precision, dx);
}

const bool g_registered = (SwiGluForward.cuda = &ForwardCuda, SwiGluBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
