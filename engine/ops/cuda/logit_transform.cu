#include "engine/ops/logit_transform.h"

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

template <class T>
__global__ void ForwardKernel(T* logits, int64_t cols, int64_t stride, float scale, float cap, DType precision) {
  T* row = logits + int64_t{blockIdx.x} * stride;
  for (int64_t j = threadIdx.x; j < cols; j += blockDim.x) {
    const float x = RoundTo(precision, Widen(row[j])) * scale;
    row[j] = Narrow<T>(RoundTo(precision, cap == 0.0f ? x : cap * tanhf(x / cap)));
  }
}

template <class T, class G>
__global__ void BackwardKernel(const T* logits, int64_t stride, int64_t cols, float scale, float cap, DType precision,
                               G* gradient, int64_t gradient_stride) {
  const float inverse = cap == 0.0f ? 0.0f : 1.0f / cap;
  const T* row = logits + int64_t{blockIdx.x} * stride;
  G* grad = gradient + int64_t{blockIdx.x} * gradient_stride;
  for (int64_t j = threadIdx.x; j < cols; j += blockDim.x) {
    const float t = Widen(row[j]) * inverse;
    grad[j] = Narrow<G>(RoundTo(precision, RoundTo(precision, Widen(grad[j])) * scale * (1.0f - t * t)));
  }
}

void ForwardCuda(const Context& context, const Matrix& logits, const LogitTransform& transform, DType precision) {
  if (logits.rows == 0 || logits.cols == 0) return;
  WithType(logits.dtype, [&]<class T>(T) {
    ForwardKernel<<<static_cast<unsigned>(logits.rows), 512, 0, StreamOf(context)>>>(
        static_cast<T*>(logits.data), logits.cols, logits.stride, transform.scale, transform.soft_cap, precision);
  });
  MB_CUDA_LAUNCHED();
}

void BackwardCuda(const Context& context, const Matrix& logits, const LogitTransform& transform, DType gradient_precision,
                  const Matrix& gradient) {
  if (logits.rows != gradient.rows || logits.cols != gradient.cols) {
    ThrowEngineError("logits of {} x {} for gradients of {} x {}", logits.rows, logits.cols, gradient.rows, gradient.cols);
  }
  if (logits.rows == 0 || logits.cols == 0) return;
  WithType(logits.dtype, [&]<class T>(T) {
    WithType(gradient.dtype, [&]<class G>(G) {
      BackwardKernel<<<static_cast<unsigned>(logits.rows), 512, 0, StreamOf(context)>>>(
          static_cast<const T*>(logits.data), logits.stride, logits.cols, transform.scale, transform.soft_cap, gradient_precision,
          static_cast<G*>(gradient.data), gradient.stride);
    });
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (TransformLogits.cuda = &ForwardCuda, TransformLogitsBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
