#include "engine/ops/causal_conv1d.h"

#include <algorithm>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

constexpr int64_t kBlock = 64;  // Channels at a time.

// The operands of some channels.
template <class P> struct ChannelBlock {
  using T = typename P::Storage;
  const T* x;
  int64_t x_stride, batch, taps, width;
  float weight[kMostConvolutionTaps][kBlock];  // By tap.
  float bias[kBlock];

  ChannelBlock(const Matrix& input, const Tensor& w, const Tensor& b, int64_t batch_size, int64_t first)
      : x(static_cast<const T*>(input.data) + first), x_stride(input.stride), batch(batch_size), taps(w.size() / w.shape[0]) {
    width = std::min(kBlock, input.cols - first);
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t i = 0; i < taps; ++i) weight[i][j] = P::Load(w.as<T>()[(first + j) * taps + i]);
      bias[j] = b.empty() ? 0.0f : P::Load(b.as<T>()[first + j]);
    }
  }

  // The row that tap i of token t reads; null before the first token.
  const T* Source(int64_t t, int64_t sequence, int64_t i) const {
    const int64_t from = t - (taps - 1) + i;
    return from < 0 ? nullptr : x + (from * batch + sequence) * x_stride;
  }

  void Sum(int64_t t, int64_t sequence, float* u) const {
    std::copy_n(bias, width, u);
    for (int64_t i = 0; i < taps; ++i) {
      const T* source = Source(t, sequence, i);
      if (source == nullptr) continue;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) u[j] += weight[i][j] * P::Load(source[j]);
    }
  }
};

void CheckShapes(const Matrix& x, const Tensor& weight, int64_t batch, const Matrix& y) {
  const int64_t taps = weight.size() / weight.shape[0];
  if (x.cols != weight.shape[0] || y.cols != x.cols || y.rows != x.rows || x.rows % batch != 0 || taps > kMostConvolutionTaps)
    ThrowEngineError("convolution of [{}, {}] by {} into [{}, {}]", x.rows, x.cols, weight.shape.ToString(), y.rows, y.cols);
}

void ForwardCpu(const Context&, const Matrix& x, const Tensor& weight, const Tensor& bias, int64_t batch, DType precision,
                const Matrix& y) {
  CheckShapes(x, weight, batch, y);
  const int64_t length = x.rows / batch;
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < x.cols; first += kBlock) {
      const ChannelBlock<P> block(x, weight, bias, batch, first);
      float u[kBlock];
      for (int64_t row = 0; row < length * batch; ++row) {
        block.Sum(row / batch, row % batch, u);
        T* out = static_cast<T*>(y.data) + row * y.stride + first;
#pragma omp simd
        for (int64_t j = 0; j < block.width; ++j) out[j] = P::Store(u[j] * cpu::Sigmoid(u[j]));
      }
    }
  });
}

// One sequence, from its last token on. weight_sum by tap.
template <class P>
void SequenceBackward(const ChannelBlock<P>& block, const Matrix& dy, const Matrix& dx, int64_t sequence, int64_t first,
                      float (*weight_sum)[kBlock], float* bias_sum) {
  using T = typename P::Storage;
  const int64_t taps = block.taps, length = dy.rows / block.batch;
  float du[kMostConvolutionTaps][kBlock] = {};  // Of the tokens t .. t + taps - 1, token t at t % taps.
  for (int64_t t = length - 1; t >= 0; --t) {
    const int64_t row = t * block.batch + sequence;
    const T* gradient = static_cast<const T*>(dy.data) + row * dy.stride + first;
    float u[kBlock], *now = du[t % taps];
    block.Sum(t, sequence, u);
#pragma omp simd
    for (int64_t j = 0; j < block.width; ++j) {
      const float s = cpu::Sigmoid(u[j]);
      now[j] = P::Load(gradient[j]) * s * (1.0f + u[j] * (1.0f - s));
      bias_sum[j] += now[j];
      u[j] = 0.0f;  // From here on dx.
    }
    for (int64_t i = 0; i < taps; ++i) {
      if (const T* source = block.Source(t, sequence, i)) {
#pragma omp simd
        for (int64_t j = 0; j < block.width; ++j) weight_sum[i][j] += now[j] * P::Load(source[j]);
      }
      const int64_t reader = t + (taps - 1) - i;  // Reads token t by tap i.
      if (reader >= length) continue;
      const float* of_reader = du[reader % taps];
#pragma omp simd
      for (int64_t j = 0; j < block.width; ++j) u[j] += block.weight[i][j] * of_reader[j];
    }
    T* out = static_cast<T*>(dx.data) + row * dx.stride + first;
#pragma omp simd
    for (int64_t j = 0; j < block.width; ++j) out[j] = P::Store(u[j]);
  }
}

void BackwardCpu(const Context&, const Matrix& dy, const Matrix& x, const Tensor& weight, const Tensor& bias, int64_t batch,
                 DType precision, const Matrix& dx, const Tensor& weight_grad, const Tensor& bias_grad) {
  CheckShapes(x, weight, batch, dy);
  CheckShapes(x, weight, batch, dx);
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < x.cols; first += kBlock) {
      const ChannelBlock<P> block(x, weight, bias, batch, first);
      float weight_sum[kMostConvolutionTaps][kBlock] = {}, bias_sum[kBlock] = {};
      for (int64_t sequence = 0; sequence < batch; ++sequence)
        SequenceBackward(block, dy, dx, sequence, first, weight_sum, bias_sum);
      for (int64_t j = 0; j < block.width; ++j) {
        for (int64_t i = 0; i < block.taps; ++i)
          weight_grad.as<float>()[(first + j) * block.taps + i] += P::Round(weight_sum[i][j]);
        if (!bias_grad.empty()) bias_grad.as<float>()[first + j] += P::Round(bias_sum[j]);
      }
    }
  });
}

}  // namespace

Op<void(const Context&, const Matrix&, const Tensor&, const Tensor&, int64_t, DType, const Matrix&)> CausalConv1dForward{
    &ForwardCpu};
Op<void(const Context&, const Matrix&, const Matrix&, const Tensor&, const Tensor&, int64_t, DType, const Matrix&, const Tensor&,
        const Tensor&)>
    CausalConv1dBackward{&BackwardCpu};

}  // namespace mbridge
