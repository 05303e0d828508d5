#include "engine/ops/geglu.h"

#include <type_traits>

#include "engine/ops/cpu/elementwise.h"
#include "engine/ops/cpu/gelu.h"

namespace mbridge {
namespace {

// f(Gelu, whether each step is rounded).
template <class F> void WithKind(GeluKind kind, F&& f) {
  switch (kind) {
    case GeluKind::kTanhFused: return f(cpu::TanhGelu(), std::false_type());
    case GeluKind::kTanh: return f(cpu::TanhGelu(), std::true_type());
    case GeluKind::kErf: return f(cpu::ErfGelu(), std::true_type());
    case GeluKind::kErfFused: return f(cpu::ErfGelu(), std::false_type());
  }
}

void ForwardCpu(const Context&, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision, const Tensor& y) {
  cpu::CheckGatedWidth(x, y);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    WithKind(kind,
             [&]<class Gelu, bool kEager>(Gelu, std::bool_constant<kEager>) { cpu::GatedForward<P, Gelu, kEager>(x, bias, y); });
  });
}

void BackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& bias, GeluKind kind, DType precision,
                 const Tensor& dx) {
  cpu::CheckGatedWidth(x, dy);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    WithKind(kind, [&]<class Gelu, bool kEager>(Gelu, std::bool_constant<kEager>) {
      cpu::GatedBackward<P, Gelu, kEager>(dy, x, bias, dx);
    });
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, GeluKind, DType, const Tensor&)> GegluForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, GeluKind, DType, const Tensor&)> GegluBackward{&BackwardCpu};

}  // namespace mbridge
