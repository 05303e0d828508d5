#include "engine/ops/scale.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

template <class T, int kWidth> struct Body {
  static constexpr int kN = kWidth;
  using Row = Pack<T, kN>;
  struct Nothing {};
  const T* x;
  T* y;
  float factor;
  int64_t n;

  __device__ Nothing Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const { return LoadPack<kN>(x + row * n + column); }
  __device__ void Finish(const Nothing&, const Row& loaded, int64_t row, int64_t column) const {
    float values[kN];
    Unpack(loaded, values);
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] *= factor;
    StoreFloats<kN>(y + row * n + column, values);
  }
};

void ScaleCuda(const Context& context, const Tensor& x, float factor, DType precision, const Tensor& y) {
  CheckStorage(x, precision);
  if (y.size() != x.size()) ThrowEngineError("{} elements scaled into {}", x.size(), y.size());
  WithType(x.dtype, [&]<class T>(T) {
    const T* in = PointerOf<T>(x);
    T* out = PointerOf<T>(y);
    LaunchFlat<4, kVectorSize<T>>(context, x.size(), AreAligned16(in, out),
                                  [&]<int kN>(std::integral_constant<int, kN>, int64_t offset, int64_t width) {
                                    return Body<T, kN>{in + offset, out + offset, factor, width};
                                  });
  });
}

const bool g_registered = (Scale.cuda = &ScaleCuda, true);

}  // namespace
}  // namespace mbridge::cuda
