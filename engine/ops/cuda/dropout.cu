#include "engine/ops/dropout.h"

#include "engine/ops/cuda/column_sums.h"

namespace mbridge::cuda {
namespace {

// Products and sums are written as intrinsics: a contracted multiply-add would differ from the separate roundings of the CPU
// twin.

template <class T, int kWidth> struct DropoutBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> x;
    Pack<uint8_t, kN> keep;
  };
  struct Nothing {};
  const T* x;
  const uint8_t* keep;
  T* y;
  float scale;
  int64_t n;

  __device__ Nothing Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const {
    return {LoadPack<kN>(x + row * n + column), LoadPack<kN>(keep + row * n + column)};
  }
  __device__ void Finish(const Nothing&, const Row& loaded, int64_t row, int64_t column) const {
    float values[kN], kept[kN];
    Unpack(loaded.x, values);
    Unpack(loaded.keep, kept);
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], kept[i]), scale);
    StoreFloats<kN>(y + row * n + column, values);
  }
};

void DropoutCuda(const Context& context, const Tensor& x, const Tensor& keep, double p, DType precision, const Tensor& y) {
  CheckStorage(x, precision);
  const float scale = DropoutScale(DropoutKind::kEager, p);
  WithType(x.dtype, [&]<class T>(T) {
    const T* in = PointerOf<T>(x);
    const uint8_t* kept = PointerOf<uint8_t>(keep);
    T* out = PointerOf<T>(y);
    const bool aligned = AreAligned16(in, out) && IsAligned(kept, kVectorSize<T>);
    LaunchFlat<4, kVectorSize<T>>(context, x.size(), aligned,
                                  [&]<int kN>(std::integral_constant<int, kN>, int64_t offset, int64_t width) {
                                    return DropoutBody<T, kN>{in + offset, kept + offset, out + offset, scale, width};
                                  });
  });
}

template <class T, int kWidth, bool kKeep, bool kFused> struct AddBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> x, residual;
    Pack<uint8_t, kKeep ? kN : 1> keep;
  };
  struct Bias {
    float values[kN];
  };
  const T *x, *bias, *residual;
  const uint8_t* keep;
  T* y;
  float scale;
  int64_t n, last;  // Rows are taken from the last on: the product before left those in the L2 cache.

  __device__ Bias Columns(int64_t column) const {
    Bias b = {};
    if (bias != nullptr) LoadFloats<kN>(bias + column, b.values);
    return b;
  }
  __device__ Row Load(int64_t row, int64_t column) const {
    Row loaded;
    const int64_t at = (last - row) * n + column;
    loaded.x = LoadPack<kN>(x + at);
    loaded.residual = LoadPack<kN>(residual + at);
    if constexpr (kKeep) loaded.keep = LoadPack<kN>(keep + at);
    return loaded;
  }
  __device__ void Finish(const Bias& b, const Row& loaded, int64_t row, int64_t column) const {
    float v[kN], r[kN];
    Unpack(loaded.x, v);
    Unpack(loaded.residual, r);
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        v[i] = __fadd_rn(v[i], b.values[i]);
        if constexpr (!kFused) v[i] = Round<T>(v[i]);
      }
    }
    if constexpr (kKeep) {
      float kept[kN];
      Unpack(loaded.keep, kept);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        v[i] = __fmul_rn(__fmul_rn(v[i], kept[i]), scale);
        if constexpr (!kFused) v[i] = Round<T>(v[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] = __fadd_rn(r[i], v[i]);
    StoreFloats<kN>(y + (last - row) * n + column, v);
  }
};

// f(whether there is a mask, whether the kind is compiled).
template <class F> void WithKind(bool has_keep, DropoutKind kind, F&& f) {
  const bool fused = kind == DropoutKind::kCompiled;
  if (has_keep) return fused ? f(std::true_type(), std::true_type()) : f(std::true_type(), std::false_type());
  return fused ? f(std::false_type(), std::true_type()) : f(std::false_type(), std::false_type());
}

void ForwardCuda(const Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& keep,
                 double p, DropoutKind kind, DType precision, const Tensor& y) {
  CheckStorage(x, precision);
  const int64_t n = LastDimension(x), rows = x.size() / n;
  const float scale = DropoutScale(kind, p);
  WithType(x.dtype, [&]<class T>(T) {
    WithKind(!keep.empty(), kind, [&]<bool kKeep, bool kFused>(std::bool_constant<kKeep>, std::bool_constant<kFused>) {
      const T *in = PointerOf<T>(x), *b = PointerOf<T>(bias), *r = PointerOf<T>(residual);
      const uint8_t* kept = PointerOf<uint8_t>(keep);
      T* out = PointerOf<T>(y);
      constexpr int kVector = kVectorSize<T>;
      if (n % kVector == 0 && AreAligned16(in, b, r, out) && IsAligned(kept, kVector)) {
        LaunchRows<2>(context, AddBody<T, kVector, kKeep, kFused>{in, b, r, kept, out, scale, n, rows - 1}, rows, n);
      } else {
        LaunchRows<2>(context, AddBody<T, 1, kKeep, kFused>{in, b, r, kept, out, scale, n, rows - 1}, rows, n);
      }
    });
  });
}

template <class T, int kWidth, bool kKeep, bool kFused> struct BackwardBody {
  static constexpr int kN = kWidth, kSums = 1;
  struct Row {
    Pack<T, kN> dy;
    Pack<uint8_t, kKeep ? kN : 1> keep;
  };
  const T* dy;
  const uint8_t* keep;
  T* dx;
  float scale;
  int64_t n;

  __device__ Row Load(int64_t row, int64_t column) const {
    Row loaded;
    loaded.dy = LoadPack<kN>(dy + row * n + column);
    if constexpr (kKeep) loaded.keep = LoadPack<kN>(keep + row * n + column);
    return loaded;
  }
  __device__ void Add(const Row& loaded, int64_t row, int64_t column, float (&sums)[1][kN]) const {
    float v[kN];
    Unpack(loaded.dy, v);
    if constexpr (kKeep) {
      float kept[kN];
      Unpack(loaded.keep, kept);
#pragma unroll
      for (int i = 0; i < kN; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], kept[i]), scale);
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) sums[0][i] += kFused ? v[i] : Round<T>(v[i]);
    if (dx != nullptr) StoreFloats<kN>(dx + row * n + column, v);
  }
};

void BackwardCuda(const Context& context, const Tensor& dy, const Tensor& keep, double p, DropoutKind kind, DType precision,
                  const Tensor& dx, const Tensor& bias_grad) {
  CheckStorage(dy, precision);
  const int64_t n = LastDimension(dy), rows = dy.size() / n;
  const float scale = DropoutScale(kind, p);
  WithType(dy.dtype, [&]<class T>(T) {
    WithKind(!keep.empty(), kind, [&]<bool kKeep, bool kFused>(std::bool_constant<kKeep>, std::bool_constant<kFused>) {
      const T* g = PointerOf<T>(dy);
      const uint8_t* kept = PointerOf<uint8_t>(keep);
      T* out = PointerOf<T>(dx);
      if (!kKeep && out == g) out = nullptr;  // Without a mask the gradient stays as it is.
      const ColumnOutputs outputs{{PointerOf<float>(bias_grad), nullptr}};
      if (out == nullptr && outputs.sums[0] == nullptr) return;
      constexpr int kVector = kVectorSize<T>;
      if (n % kVector == 0 && AreAligned16(g, out) && IsAligned(kept, kVector)) {
        SumColumns<T>(context, BackwardBody<T, kVector, kKeep, kFused>{g, kept, out, scale, n}, rows, n, outputs);
      } else {
        SumColumns<T>(context, BackwardBody<T, 1, kKeep, kFused>{g, kept, out, scale, n}, rows, n, outputs);
      }
    });
  });
}

const bool g_registered =
    (Dropout.cuda = &DropoutCuda, BiasDropoutAddForward.cuda = &ForwardCuda, BiasDropoutAddBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
