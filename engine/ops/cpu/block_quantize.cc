#include "engine/ops/block_quantize.h"

#include <algorithm>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

// f(x's elements, y's elements) with their types.
template <class F> void WithElements(const Tensor& x, const Tensor& y, F&& f) {
  const auto with = [](const Tensor& tensor, auto&& g) {
    switch (tensor.dtype) {
      case DType::kF32: return g(tensor.as<float>());
      case DType::kBF16: return g(tensor.as<BFloat16>());
      case DType::kF16: return g(tensor.as<Float16>());
      default: ThrowEngineError("no quantised copy of {}", NameOf(tensor.dtype));
    }
  };
  with(x, [&](auto* from) { with(y, [&](auto* to) { f(from, to); }); });
}

void BlockQuantizeCpu(const Context&, const Tensor& x, const BlockQuantizeOptions& options, const Tensor& amax, const Tensor& y) {
  CheckBlockQuantize(x, options, amax, y);
  const int64_t rows = x.shape[0], cols = x.shape[1], length = BlockLength(options.format);
  const int64_t height = options.square || options.down_rows ? length : 1,
                width = options.square || !options.down_rows ? length : 1;
  const float tensor_step = options.format == BlockFormat::kNvfp4 ? TensorStep(*amax.as<float>(), options) : 1.0f;
  const int64_t down = (rows + height - 1) / height, across = (cols + width - 1) / width;
  WithElements(x, y, [&]<class From, class To>(const From* from, To* to) {
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < down * across; ++block) {
      const int64_t row_begin = block / across * height, row_end = std::min(rows, row_begin + height);
      const int64_t col_begin = block % across * width, col_end = std::min(cols, col_begin + width);
      float largest = 0.0f;
      for (int64_t row = row_begin; row < row_end; ++row) {
        for (int64_t col = col_begin; col < col_end; ++col) {
          largest = std::fmax(largest, std::fabs(ToFloat(from[row * cols + col])));
        }
      }
      const float step = BlockStep(largest, options, tensor_step);
      for (int64_t row = row_begin; row < row_end; ++row) {
        for (int64_t col = col_begin; col < col_end; ++col) {
          const int64_t place = row * cols + col;
          to[place] = cpu::Narrow<To>(QuantizedValue(ToFloat(from[place]), step, options, place));
        }
      }
    }
  });
}

void HadamardDownRowsCpu(const Context&, const Tensor& x, const Tensor& y) {
  if (x.shape.rank() != 2 || x.shape[0] % kHadamardSize != 0 || y.size() != x.size()) {
    ThrowEngineError("Hadamard transform of {} into {}", x.shape.ToString(), y.shape.ToString());
  }
  const int64_t cols = x.shape[1], groups = x.shape[0] / kHadamardSize;
  WithElements(x, y, [&]<class From, class To>(const From* from, To* to) {
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < groups * cols; ++item) {
      const int64_t first = item / cols * kHadamardSize * cols + item % cols;
      float values[kHadamardSize];
      for (int i = 0; i < kHadamardSize; ++i) {
        const float value = ToFloat(from[first + i * cols]);
        values[i] = (kHadamardSigns >> i & 1) != 0 ? -value : value;
      }
      for (int half = 1; half < kHadamardSize; half *= 2) {
        for (int i = 0; i < kHadamardSize; ++i) {
          if ((i & half) != 0) continue;
          const float a = values[i], b = values[i + half];
          values[i] = a + b, values[i + half] = a - b;
        }
      }
      for (int i = 0; i < kHadamardSize; ++i) to[first + i * cols] = cpu::Narrow<To>(values[i] * 0.25f);
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const BlockQuantizeOptions&, const Tensor&, const Tensor&)> BlockQuantize{
    &BlockQuantizeCpu};
Op<void(const Context&, const Tensor&, const Tensor&)> HadamardDownRows{&HadamardDownRowsCpu};

void CheckBlockQuantize(const Tensor& x, const BlockQuantizeOptions& options, const Tensor& amax, const Tensor& y) {
  if (x.shape.rank() != 2 || y.size() != x.size()) {
    ThrowEngineError("quantised copy of {} in {}: two dimensions, as many elements", x.shape.ToString(), y.shape.ToString());
  }
  if (options.format == BlockFormat::kNvfp4 && (amax.empty() || amax.dtype != DType::kF32)) {
    ThrowEngineError("a 4-bit copy without the tensor's largest value");
  }
}

}  // namespace mbridge
