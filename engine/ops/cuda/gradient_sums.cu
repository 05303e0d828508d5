#include "engine/ops/gradient_sums.h"

#include "engine/ops/cuda/column_sums.h"

namespace mbridge::cuda {
namespace {

// T: storage of the gradient; P: the precision it is rounded to.
template <class T, class P, int kWidth> struct AddBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> gradient;
    Pack<float, kN> sum;
  };
  struct Nothing {};
  const T* gradient;
  float* sum;
  int64_t n;

  __device__ Nothing Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const {
    return {LoadPack<kN>(gradient + row * n + column), LoadPack<kN>(sum + row * n + column)};
  }
  __device__ void Finish(const Nothing&, const Row& loaded, int64_t row, int64_t column) const {
    float g[kN], total[kN];
    Unpack(loaded.gradient, g);
    Unpack(loaded.sum, total);
#pragma unroll
    for (int i = 0; i < kN; ++i) total[i] += Round<P>(g[i]);
    StoreFloats<kN>(sum + row * n + column, total);
  }
};

void AddGradientCuda(const Context& context, const Tensor& grad, DType precision, const Tensor& main_grad) {
  const int64_t count = main_grad.size();
  if (grad.size() != count) ThrowEngineError("gradient of {} elements for {}", grad.size(), count);
  WithStorage(grad.dtype, precision, [&]<class T, class P>(T, P) {
    const T* g = PointerOf<T>(grad);
    float* sum = PointerOf<float>(main_grad);
    LaunchFlat<2, kVectorSize<T>>(context, count, AreAligned16(g, sum),
                                  [&]<int kN>(std::integral_constant<int, kN>, int64_t offset, int64_t width) {
                                    return AddBody<T, P, kN>{g + offset, sum + offset, width};
                                  });
  });
}

template <class T, class P, int kWidth> struct SumBody {
  static constexpr int kN = kWidth, kSums = 1;
  using Row = Pack<T, kN>;
  const T* x;
  int64_t n;

  __device__ Row Load(int64_t row, int64_t column) const { return LoadPack<kN>(x + row * n + column); }
  __device__ void Add(const Row& loaded, int64_t, int64_t, float (&sums)[1][kN]) const {
    float values[kN];
    Unpack(loaded, values);
#pragma unroll
    for (int i = 0; i < kN; ++i) sums[0][i] += Round<P>(values[i]);
  }
};

void AddColumnSumsCuda(const Context& context, const Tensor& x, DType precision, const Tensor& main_grad) {
  const int64_t n = main_grad.size(), rows = x.size() / n;
  const ColumnOutputs outputs{{PointerOf<float>(main_grad), nullptr}};
  WithStorage(x.dtype, precision, [&]<class T, class P>(T, P) {
    const T* values = PointerOf<T>(x);
    if (n % kVectorSize<T> == 0 && AreAligned16(values)) {
      SumColumns<P>(context, SumBody<T, P, kVectorSize<T>>{values, n}, rows, n, outputs);
    } else {
      SumColumns<P>(context, SumBody<T, P, 1>{values, n}, rows, n, outputs);
    }
  });
}

const bool g_registered = (AddGradient.cuda = &AddGradientCuda, AddColumnSums.cuda = &AddColumnSumsCuda, true);

}  // namespace
}  // namespace mbridge::cuda
