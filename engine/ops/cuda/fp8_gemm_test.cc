#include "engine/ops/fp8_gemm.h"

#include "engine/ops/cuda/test_device.h"

namespace mbridge::test {
namespace {

// Some values are beyond the formats' ends.
constexpr double kOrders = 12;

TEST(Fp8Cuda, SmallCopiesEqualTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 16}, {48, 272}, {144, 112}, {256, 128}}) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
        const Owned x(dtype, {rows, cols}, SpreadValues(rows * cols, 1, kOrders)), scale(DType::kF32, {1}, {0.75}),
            amax(DType::kF32, {1}, {0.5});
        const Owned rowwise(DType::kU8, {rows, cols}), columnwise(DType::kU8, {cols, rows});
        Fp8Quantize.cpu({}, x, scale, format, rowwise, columnwise, amax);
        const OnGpu x_gpu(x), scale_gpu(scale), amax_gpu(Owned(DType::kF32, {1}, {0.5})), alone(Owned(DType::kF32, {1}, {0.5}));
        const OnGpu rowwise_gpu(DType::kU8, {rows, cols}), columnwise_gpu(DType::kU8, {cols, rows});
        Fp8Quantize(gpu, x_gpu, scale_gpu, format, rowwise_gpu, columnwise_gpu, amax_gpu);
        Fp8Amax(gpu, x_gpu, alone);
        EXPECT_EQ(rowwise_gpu.ToValues(), rowwise.ToValues()) << rows << " x " << cols << ' ' << NameOf(dtype);
        EXPECT_EQ(columnwise_gpu.ToValues(), columnwise.ToValues()) << rows << " x " << cols << ' ' << NameOf(dtype);
        EXPECT_EQ(amax_gpu.ToValues(), amax.ToValues());
        EXPECT_EQ(alone.ToValues(), amax.ToValues());
        const OnGpu only(DType::kU8, {cols, rows});
        Fp8Quantize(gpu, x_gpu, scale_gpu, format, {}, only, {});
        EXPECT_EQ(only.ToValues(), columnwise.ToValues());
        const Owned scales(DType::kF32, {3, kFp8ScalePitch}, {300.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0});
        const OnGpu scales_gpu(scales), by_amax(DType::kU8, {rows, cols});
        Fp8QuantizeByAmax.cpu({}, x, {.format = format, .margin = 1}, scales, rowwise, {});
        Fp8QuantizeByAmax(gpu, x_gpu, {.format = format, .margin = 1}, scales_gpu, by_amax, {});
        EXPECT_EQ(by_amax.ToValues(), rowwise.ToValues());
        EXPECT_EQ(scales_gpu.ToValues(), scales.ToValues());
      }
    }
  }
}

TEST(Fp8Cuda, SmallScalesEqualTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  Values maxima = SpreadValues(5 * 300, 4, kOrders);
  for (double& x : maxima) x = std::fabs(x);
  maxima[1] = 0, maxima[2] = INFINITY, maxima[3] = 1e-38;
  for (const Fp8ScaleOptions& options : {Fp8ScaleOptions{}, {.format = Fp8Format::kE5M2, .margin = 2}, {.power_of_two = true}}) {
    for (const bool most_recent : {false, true}) {
      const Owned history(DType::kF32, {5, 300}, maxima), delayed(DType::kF32, {300}),
          inverse_delayed(DType::kF32, {300, kFp8ScalePitch});
      const OnGpu history_gpu(history), delayed_gpu(DType::kF32, {300}), inverse_delayed_gpu(inverse_delayed);
      Fp8DelayedScales.cpu({}, history, most_recent, options, delayed, inverse_delayed);
      Fp8DelayedScales(gpu, history_gpu, most_recent, options, delayed_gpu, inverse_delayed_gpu);
      EXPECT_EQ(delayed_gpu.ToValues(), delayed.ToValues());
      EXPECT_EQ(inverse_delayed_gpu.ToValues(), inverse_delayed.ToValues());
      EXPECT_EQ(history_gpu.ToValues(), history.ToValues());
    }
  }
}

// Random codes of a matrix; NaN and infinity are left out.
Values Codes(int64_t count, uint32_t seed, Fp8Format format) {
  Values codes = RandomValues(count, seed);
  for (double& x : codes) x = ToFp8(static_cast<float>(x), format);
  return codes;
}

TEST(Fp8Cuda, SmallProductsNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  struct Case {
    int64_t m, n, k;
    Fp8Format a, b;
  };
  constexpr Fp8Format k4 = Fp8Format::kE4M3, k5 = Fp8Format::kE5M2;
  for (const Case& c :
       {Case{16, 16, 16, k4, k4}, Case{48, 80, 112, k4, k4}, Case{128, 256, 64, k5, k4}, Case{64, 32, 272, k4, k5}}) {
    const Values a = Codes(c.m * c.k, 1, c.a), b = Codes(c.n * c.k, 2, c.b);
    const Owned a_host(DType::kU8, {c.m, c.k}, a), b_host(DType::kU8, {c.n, c.k}, b);
    const Owned a_inverse(DType::kF32, {1}, {0.5}), b_inverse(DType::kF32, {1}, {3.0});
    const OnGpu a_gpu(a_host), b_gpu(b_host), a_inverse_gpu(a_inverse), b_inverse_gpu(b_inverse);
    const auto matrix = [](const Tensor& x, const Tensor& inverse, Fp8Format format) {
      return Fp8Matrix{x.data, format, inverse.as<float>(), x.shape[0], x.shape[1], x.shape[1]};
    };
    for (const DType out : kGpuTypes) {
      for (int flags = 0; flags < 4; ++flags) {
        const Fp8GemmOptions options{.accumulate = (flags & 1) != 0 && out == DType::kF32, .fast_accumulate = (flags & 2) != 0};
        const Values before = RandomValues(c.m * c.n, 3);
        const Owned expected(out, {c.m, c.n}, before);
        const OnGpu actual(out, {c.m, c.n}, before);
        Fp8Gemm.cpu({}, matrix(a_host, a_inverse, c.a), matrix(b_host, b_inverse, c.b), AsMatrix(expected), options);
        Fp8Gemm(gpu, matrix(a_gpu, a_inverse_gpu, c.a), matrix(b_gpu, b_inverse_gpu, c.b), AsMatrix(actual), options);
        const double step = out == DType::kBF16 ? 1.0 / 128 : 1.0 / 1024;
        ExpectNear(actual.ToValues(), expected.ToValues(), step,
                   (options.fast_accumulate ? 2e-4 : 2e-5) * static_cast<double>(c.k));
      }
    }
  }
}

TEST(Fp8Cuda, SmallBlockwiseCopiesEqualTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{128, 128}, {256, 640}}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const bool squares : {false, true}) {
        for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
          Values values = SpreadValues(rows * cols, 5, kOrders);
          std::fill_n(values.begin(), 128, 0.0);
          const Owned x(dtype, {rows, cols}, values);
          const Fp8Scaling scaling = squares ? Fp8Scaling::kSquares : Fp8Scaling::kVectors;
          const int64_t count = Fp8ScaleCount(scaling, rows, cols), transposed_count = Fp8ScaleCount(scaling, cols, rows);
          const Owned codes(DType::kU8, {rows, cols}), scales(DType::kF32, {count}), transposed(DType::kU8, {cols, rows}),
              transposed_scales(DType::kF32, {transposed_count});
          Fp8BlockQuantize.cpu({}, x, format, squares, codes, scales, transposed, transposed_scales);
          const OnGpu x_gpu(x), codes_gpu(DType::kU8, {rows, cols}), scales_gpu(Owned(DType::kF32, {count})),
              transposed_gpu(DType::kU8, {cols, rows}), transposed_scales_gpu(Owned(DType::kF32, {transposed_count}));
          Fp8BlockQuantize(gpu, x_gpu, format, squares, codes_gpu, scales_gpu, transposed_gpu, transposed_scales_gpu);
          EXPECT_EQ(codes_gpu.ToValues(), codes.ToValues());
          EXPECT_EQ(scales_gpu.ToValues(), scales.ToValues());
          EXPECT_EQ(transposed_gpu.ToValues(), transposed.ToValues());
          EXPECT_EQ(transposed_scales_gpu.ToValues(), transposed_scales.ToValues());
          const OnGpu only(DType::kU8, {cols, rows}), only_scales(Owned(DType::kF32, {transposed_count}));
          Fp8BlockQuantize(gpu, x_gpu, format, squares, {}, {}, only, only_scales);
          EXPECT_EQ(only.ToValues(), transposed.ToValues());
        }
      }
    }
  }
}

// Operands of blocks whose sizes differ by powers of two: wrong scales would show at once.
TEST(Fp8Cuda, BlockwiseProductsMatchTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  bool available = false;
  Fp8BlockProducts(gpu, &available);
  if (!available) GTEST_SKIP() << "no products with scales of blocks here";
  const auto uneven = [](int64_t rows, int64_t cols, uint32_t seed) {
    Values values = RandomValues(rows * cols, seed);
    for (int64_t i = 0; i < rows * cols; ++i)
      values[i] *= std::exp2(static_cast<double>((i / cols * 7 + i % cols / 128 * 5) % 11) - 5);
    return values;
  };
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{128, 256, 384}, {384, 128, 640}, {1024, 512, 2048}}) {
    for (const bool squares : {true, false}) {
      const Fp8Format format = Fp8Format::kE5M2;
      const Fp8Scaling scaling = squares ? Fp8Scaling::kSquares : Fp8Scaling::kVectors;
      const Owned a(DType::kBF16, {m, k}, uneven(m, k, 1)), b(DType::kBF16, {n, k}, uneven(n, k, 2));
      const Owned a_codes(DType::kU8, {m, k}), a_scales(DType::kF32, {Fp8ScaleCount(Fp8Scaling::kVectors, m, k)});
      const Owned b_codes(DType::kU8, {n, k}), b_scales(DType::kF32, {Fp8ScaleCount(scaling, n, k)});
      Fp8BlockQuantize.cpu({}, a, format, false, a_codes, a_scales, {}, {});
      Fp8BlockQuantize.cpu({}, b, Fp8Format::kE4M3, squares, b_codes, b_scales, {}, {});
      const OnGpu a_codes_gpu(a_codes), a_scales_gpu(a_scales), b_codes_gpu(b_codes), b_scales_gpu(b_scales);
      const auto matrix = [](const Tensor& x, const Tensor& scales, Fp8Format of, Fp8Scaling by) {
        return Fp8Matrix{x.data, of, scales.as<float>(), x.shape[0], x.shape[1], x.shape[1], by};
      };
      for (const DType out : {DType::kBF16, DType::kF32}) {
        const Values before = RandomValues(m * n, 3);
        const Owned expected(out, {m, n}, before);
        const OnGpu actual(out, {m, n}, before);
        const Fp8GemmOptions options{.accumulate = out == DType::kF32};
        Fp8Gemm.cpu({}, matrix(a_codes, a_scales, format, Fp8Scaling::kVectors),
                    matrix(b_codes, b_scales, Fp8Format::kE4M3, scaling), AsMatrix(expected), options);
        Fp8Gemm(gpu, matrix(a_codes_gpu, a_scales_gpu, format, Fp8Scaling::kVectors),
                matrix(b_codes_gpu, b_scales_gpu, Fp8Format::kE4M3, scaling), AsMatrix(actual), options);
        // Terms up to 2^10; the tensor cores keep some 14 bits of 128 sums.
        ExpectNear(actual.ToValues(), expected.ToValues(), 1.0 / 128, 0.05 * std::sqrt(static_cast<double>(k)));
      }
    }
  }
}

TEST(Fp8Cuda, RefusesOddShapes) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const OnGpu x(DType::kBF16, {16, 24}), scale(DType::kF32, {1}), out(DType::kU8, {16, 24});
  EXPECT_THROW(Fp8Quantize(gpu, x, scale, Fp8Format::kE4M3, out, {}, {}), EngineError);
}

}  // namespace
}  // namespace mbridge::test
