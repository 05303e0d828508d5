// Loops of the activations over the outputs of the first MLP layer.
#pragma once

#include "engine/core/tensor.h"
#include "engine/ops/cpu/precision.h"

namespace mbridge::cpu {

// apply(place, u) for every element of x [rows, n], u = x + bias; bias [n] or empty. kRoundSum: the sum is rounded.
template <class P, bool kRoundSum, class F> void ForEachSum(const Tensor& x, const Tensor& bias, F&& apply) {
  const int64_t n = x.shape[x.shape.rank() - 1], rows = x.size() / n;
  const auto* values = x.as<typename P::Storage>();
  const auto* b = bias.empty() ? nullptr : bias.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const auto* row = values + i * n;
    if (b == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) apply(i * n + j, P::Load(row[j]));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float u = P::Load(row[j]) + P::Load(b[j]);
        apply(i * n + j, kRoundSum ? P::Round(u) : u);
      }
    }
  }
}

// apply(row, column of y, u1, u2) for every pair of x [rows, 2 n]: u1 from the first n columns (the gates), u2 from the others.
template <class P, bool kRoundSum, class F> void ForEachPair(const Tensor& x, const Tensor& bias, F&& apply) {
  const int64_t width = x.shape[x.shape.rank() - 1], n = width / 2, rows = x.size() / width;
  const auto* values = x.as<typename P::Storage>();
  const auto* b = bias.empty() ? nullptr : bias.as<typename P::Storage>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const auto* row = values + i * width;
    if (b == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) apply(i, j, P::Load(row[j]), P::Load(row[j + n]));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float u1 = P::Load(row[j]) + P::Load(b[j]), u2 = P::Load(row[j + n]) + P::Load(b[j + n]);
        apply(i, j, kRoundSum ? P::Round(u1) : u1, kRoundSum ? P::Round(u2) : u2);
      }
    }
  }
}

// Gated activations: Gate::Value(u1) u2. kEager: sums, the gate and the product are rounded, as separate PyTorch operations do;
// else only the end.
template <class P, class Gate, bool kEager> void GatedForward(const Tensor& x, const Tensor& bias, const Tensor& y) {
  const int64_t n = x.shape[x.shape.rank() - 1] / 2;
  auto* out = y.as<typename P::Storage>();
  ForEachPair<P, kEager>(x, bias, [out, n](int64_t i, int64_t j, float u1, float u2) {
    const float gate = Gate::Value(u1);
    out[i * n + j] = P::Store((kEager ? P::Round(gate) : gate) * u2);
  });
}

template <class P, class Gate, bool kEager>
void GatedBackward(const Tensor& dy, const Tensor& x, const Tensor& bias, const Tensor& dx) {
  const int64_t n = x.shape[x.shape.rank() - 1] / 2;
  const auto* g = dy.as<typename P::Storage>();
  auto* out = dx.as<typename P::Storage>();
  ForEachPair<P, kEager>(x, bias, [g, out, n](int64_t i, int64_t j, float u1, float u2) {
    const float d = P::Load(g[i * n + j]), value = Gate::Value(u1), gate = kEager ? P::Round(value) : value;
    out[i * 2 * n + j] = P::Store((kEager ? P::Round(d * u2) : d * u2) * Gate::Slope(u1));
    out[i * 2 * n + n + j] = P::Store(d * gate);
  });
}

inline void CheckGatedWidth(const Tensor& x, const Tensor& y) {
  if (x.size() != 2 * y.size()) ThrowEngineError("gated activation of {} into {}", x.shape.ToString(), y.shape.ToString());
}

}  // namespace mbridge::cpu
