#include "engine/ops/bias_add.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

// T: storage; P: the precision.
template <class T, class P, int kWidth> struct Body {
  static constexpr int kN = kWidth;
  using Row = Pack<T, kN>;
  struct Bias {
    float values[kN];
  };
  T* x;
  const T* bias;
  int64_t n;

  __device__ Bias Columns(int64_t column) const {
    Bias b;
    LoadFloats<kN>(bias + column, b.values);
    return b;
  }
  __device__ Row Load(int64_t row, int64_t column) const { return LoadPack<kN>(x + row * n + column); }
  __device__ void Finish(const Bias& b, const Row& loaded, int64_t row, int64_t column) const {
    float values[kN];
    Unpack(loaded, values);
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = Round<P>(Round<P>(values[i]) + Round<P>(b.values[i]));
    StoreFloats<kN>(x + row * n + column, values);
  }
};

void BiasAddCuda(const Context& context, const Tensor& x, const Tensor& bias, DType precision) {
  const int64_t n = bias.size(), rows = x.size() / n;
  WithStorage(x.dtype, precision, [&]<class T, class P>(T, P) {
    T* values = PointerOf<T>(x);
    const T* b = PointerOf<T>(bias);
    if (n % kVectorSize<T> == 0 && AreAligned16(values, b)) {
      LaunchRows<4>(context, Body<T, P, kVectorSize<T>>{values, b, n}, rows, n);
    } else {
      LaunchRows<4>(context, Body<T, P, 1>{values, b, n}, rows, n);
    }
  });
}

const bool g_registered = (BiasAdd.cuda = &BiasAddCuda, true);

}  // namespace
}  // namespace mbridge::cuda
