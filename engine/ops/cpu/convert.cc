#include "engine/ops/convert.h"

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

template <class F> void WithStorage(const Tensor& tensor, F&& f) {
  switch (tensor.dtype) {
    case DType::kF32: return f(tensor.as<float>());
    case DType::kBF16: return f(tensor.as<BFloat16>());
    case DType::kF16: return f(tensor.as<Float16>());
    default: ThrowEngineError("conversion of {}", NameOf(tensor.dtype));
  }
}

void ConvertCpu(const Context&, const Tensor& from, DType precision, const Tensor& to) {
  const int64_t count = from.size();
  if (to.size() != count) ThrowEngineError("conversion of {} elements into {}", count, to.size());
  WithStorage(from, [&]<class A>(const A* in) {
    WithStorage(to, [&]<class B>(B* out) {
      // The precision is tested outside of the loop, so that each loop vectorises.
      const auto run = [&]<class Rounding>(Rounding round) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; ++i) out[i] = cpu::Narrow<B>(round(ToFloat(in[i])));
      };
      if (precision == DType::kBF16) {
        run([](float x) { return cpu::RoundToBF16(x); });
      } else if (precision == DType::kF16) {
        run([](float x) { return ToFloat(ToFloat16(x)); });
      } else {
        run([](float x) { return x; });
      }
    });
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, DType, const Tensor&)> Convert{&ConvertCpu};

}  // namespace mbridge
