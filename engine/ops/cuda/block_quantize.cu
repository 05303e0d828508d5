#include "engine/ops/block_quantize.h"

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256;

// A block of threads for one square of weights, one thread for one run of neighbours: both walk over their elements twice.
template <class From, class To>
__global__ void BlockQuantizeKernel(const From* x, int64_t rows, int64_t cols, int64_t height, int64_t width, int threads_each,
                                    BlockQuantizeOptions options, const float* amax, To* y) {
  __shared__ float shared[32];
  const int64_t across = (cols + width - 1) / width, blocks = (rows + height - 1) / height * across;
  const int64_t block = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / threads_each;
  const int lane = threadIdx.x % threads_each;
  const float tensor_step = options.format == BlockFormat::kNvfp4 ? TensorStep(*amax, options) : 1.0f;
  const int64_t row_begin = block / across * height, col_begin = block % across * width;
  const auto tall = static_cast<int>(min(height, rows - row_begin)), wide = static_cast<int>(min(width, cols - col_begin));
  const int count = block < blocks ? tall * wide : 0;
  float largest = 0.0f;
  for (int i = lane; i < count; i += threads_each) {
    largest = fmaxf(largest, fabsf(Widen(x[(row_begin + i / wide) * cols + col_begin + i % wide])));
  }
  if (threads_each == kThreads) largest = BlockMax(largest, shared);
  const float step = BlockStep(largest, options, tensor_step);
  for (int i = lane; i < count; i += threads_each) {
    const int64_t place = (row_begin + i / wide) * cols + col_begin + i % wide;
    y[place] = Narrow<To>(QuantizedValue(Widen(x[place]), step, options, place));
  }
}

void BlockQuantizeCuda(const Context& context, const Tensor& x, const BlockQuantizeOptions& options, const Tensor& amax,
                       const Tensor& y) {
  CheckBlockQuantize(x, options, amax, y);
  if (x.size() == 0) return;
  const int64_t rows = x.shape[0], cols = x.shape[1], length = BlockLength(options.format);
  const int64_t height = options.square || options.down_rows ? length : 1,
                width = options.square || !options.down_rows ? length : 1;
  // One thread walks a run of neighbours: in a column the threads' reads lie side by side, in a row they share cache lines.
  const int threads_each = options.square ? kThreads : 1;
  const int64_t blocks = (rows + height - 1) / height * ((cols + width - 1) / width);
  const int64_t grid = (blocks * threads_each + kThreads - 1) / kThreads;
  WithType(x.dtype, [&]<class From>(From) {
    WithType(y.dtype, [&]<class To>(To) {
      BlockQuantizeKernel<<<static_cast<unsigned>(grid), kThreads, 0, StreamOf(context)>>>(
          static_cast<const From*>(x.data), rows, cols, height, width, threads_each, options,
          amax.empty() ? nullptr : amax.as<float>(), static_cast<To*>(y.data));
    });
  });
  MB_CUDA_LAUNCHED();
}

template <class From, class To> __global__ void HadamardDownRowsKernel(const From* x, int64_t items, int64_t cols, To* y) {
  const int64_t item = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (item >= items) return;
  const int64_t first = item / cols * kHadamardSize * cols + item % cols;
  float values[kHadamardSize];
#pragma unroll
  for (int i = 0; i < kHadamardSize; ++i) {
    const float value = Widen(x[first + i * cols]);
    values[i] = (kHadamardSigns >> i & 1) != 0 ? -value : value;
  }
#pragma unroll
  for (int half = 1; half < kHadamardSize; half *= 2) {
#pragma unroll
    for (int i = 0; i < kHadamardSize; ++i) {
      if ((i & half) != 0) continue;
      const float a = values[i], b = values[i + half];
      values[i] = a + b, values[i + half] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < kHadamardSize; ++i) y[first + i * cols] = Narrow<To>(values[i] * 0.25f);
}

void HadamardDownRowsCuda(const Context& context, const Tensor& x, const Tensor& y) {
  if (x.shape.rank() != 2 || x.shape[0] % kHadamardSize != 0 || y.size() != x.size()) {
    ThrowEngineError("Hadamard transform of {} into {}", x.shape.ToString(), y.shape.ToString());
  }
  const int64_t items = x.size() / kHadamardSize;
  if (items == 0) return;
  WithType(x.dtype, [&]<class From>(From) {
    WithType(y.dtype, [&]<class To>(To) {
      HadamardDownRowsKernel<<<static_cast<unsigned>((items + kThreads - 1) / kThreads), kThreads, 0, StreamOf(context)>>>(
          static_cast<const From*>(x.data), items, x.shape[1], static_cast<To*>(y.data));
    });
  });
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (BlockQuantize.cuda = &BlockQuantizeCuda, HadamardDownRows.cuda = &HadamardDownRowsCuda, true);

}  // namespace
}  // namespace mbridge::cuda
