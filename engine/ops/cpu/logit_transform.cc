#include "engine/ops/logit_transform.h"

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

void ForwardCpu(const Context&, const Matrix& logits, const LogitTransform& transform, DType precision) {
  const auto [scale, cap] = transform;
  cpu::WithPrecision(logits.dtype, precision, [&, scale = scale, cap = cap]<class P>(P) {
    auto* values = static_cast<typename P::Storage*>(logits.data);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < logits.rows; ++i) {
      auto* row = values + i * logits.stride;
      if (cap == 0.0f) {
#pragma omp simd
        for (int64_t j = 0; j < logits.cols; ++j) row[j] = P::Store(P::Load(row[j]) * scale);
      } else {
#pragma omp simd
        for (int64_t j = 0; j < logits.cols; ++j) row[j] = P::Store(cap * cpu::Tanh(P::Load(row[j]) * scale / cap));
      }
    }
  });
}

template <class P, class T> void Backward(const Matrix& logits, const LogitTransform& transform, const Matrix& gradient) {
  const auto [scale, cap] = transform;
  const float inverse = cap == 0.0f ? 0.0f : 1.0f / cap;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < gradient.rows; ++i) {
    const T* row = static_cast<const T*>(logits.data) + i * logits.stride;
    auto* grad = static_cast<typename P::Storage*>(gradient.data) + i * gradient.stride;
#pragma omp simd
    for (int64_t j = 0; j < gradient.cols; ++j) {
      const float t = ToFloat(row[j]) * inverse;
      grad[j] = P::Store(P::Load(grad[j]) * scale * (1.0f - t * t));
    }
  }
}

void BackwardCpu(const Context&, const Matrix& logits, const LogitTransform& transform, DType gradient_precision,
                 const Matrix& gradient) {
  if (logits.rows != gradient.rows || logits.cols != gradient.cols) {
    ThrowEngineError("logits of {} x {} for gradients of {} x {}", logits.rows, logits.cols, gradient.rows, gradient.cols);
  }
  cpu::WithPrecision(gradient.dtype, gradient_precision, [&]<class P>(P) {
    switch (logits.dtype) {
      case DType::kF32: return Backward<P, float>(logits, transform, gradient);
      case DType::kBF16: return Backward<P, BFloat16>(logits, transform, gradient);
      case DType::kF16: return Backward<P, Float16>(logits, transform, gradient);
      default: ThrowEngineError("logits of {}", NameOf(logits.dtype));
    }
  });
}

}  // namespace

Op<void(const Context&, const Matrix&, const LogitTransform&, DType)> TransformLogits{&ForwardCpu};
Op<void(const Context&, const Matrix&, const LogitTransform&, DType, const Matrix&)> TransformLogitsBackward{&BackwardCpu};

}  // namespace mbridge
