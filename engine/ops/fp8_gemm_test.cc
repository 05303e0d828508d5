#include "engine/ops/fp8_gemm.h"

#include <algorithm>
#include <limits>

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::Values;

TEST(Fp8Test, EveryCodeSurvives) {
  for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
    for (int code = 0; code < 256; ++code) {
      const float value = FromFp8(static_cast<uint8_t>(code), format);
      if (!std::isfinite(value)) continue;
      EXPECT_EQ(ToFp8(value, format), code) << value;
    }
    EXPECT_TRUE(std::isnan(FromFp8(ToFp8(NAN, format), format)));
    EXPECT_EQ(FromFp8(ToFp8(INFINITY, format), format), LargestOf(format));
    EXPECT_EQ(FromFp8(ToFp8(-1e9f, format), format), -LargestOf(format));
  }
}

TEST(Fp8Test, RoundsToTheNearestAndTiesToEven) {
  for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
    const int largest = format == Fp8Format::kE4M3 ? 0x7e : 0x7b;
    for (int code = 0; code < largest; ++code) {
      const double low = FromFp8(static_cast<uint8_t>(code), format), high = FromFp8(static_cast<uint8_t>(code + 1), format);
      const auto middle = static_cast<float>((low + high) / 2);
      EXPECT_EQ(ToFp8(middle, format), code % 2 == 0 ? code : code + 1) << middle;
      EXPECT_EQ(ToFp8(std::nextafter(middle, 0.0f), format), code);
      EXPECT_EQ(ToFp8(std::nextafter(middle, 1e9f), format), code + 1);
    }
  }
  EXPECT_EQ(FromFp8(0x01, Fp8Format::kE4M3), std::ldexp(1.0f, -9));
  EXPECT_EQ(FromFp8(0x01, Fp8Format::kE5M2), std::ldexp(1.0f, -16));
}

// Of tensors with these largest values.
void ScalesOf(const Values& amax, const Fp8ScaleOptions& options, const Owned& scale, const Owned& inverse) {
  const Owned history(DType::kF32, {1, static_cast<int64_t>(amax.size())}, amax);
  Fp8DelayedScales({}, history, true, options, scale, inverse);
}

TEST(Fp8Test, Scales) {
  const Values amax = {2.0, 0.0, INFINITY, 1e-38, 3.0};
  const Owned scale(DType::kF32, {5}), inverse(DType::kF32, {5, kFp8ScalePitch});
  ScalesOf(amax, {}, scale, inverse);
  EXPECT_EQ(scale[0], 224.0);
  EXPECT_EQ(inverse[0], static_cast<double>(1.0f / 224.0f));
  EXPECT_EQ(scale[1], 1.0);
  EXPECT_EQ(scale[2], 1.0);
  EXPECT_EQ(scale[3], static_cast<double>(std::numeric_limits<float>::max()));
  ScalesOf(amax, {.format = Fp8Format::kE5M2, .margin = 1, .power_of_two = true}, scale, inverse);
  EXPECT_EQ(scale[4], 8192.0);  // 57344 / 3 / 2 = 9557.3.
}

TEST(Fp8Test, CurrentScalingTakesTheSameScale) {
  for (const double amax : {3.0, 0.0, static_cast<double>(INFINITY)}) {
    const Fp8ScaleOptions options{.margin = 2};
    const Owned x(DType::kF32, {16, 16}, test::RandomValues(256, 1)), scale(DType::kF32, {1}),
        inverse(DType::kF32, {1, kFp8ScalePitch}), scales(DType::kF32, {3, kFp8ScalePitch}, [&] {
          Values values(3 * kFp8ScalePitch);
          values[0] = amax;
          return values;
        }());
    const Owned by_scale(DType::kU8, {16, 16}), by_amax(DType::kU8, {16, 16});
    ScalesOf({amax}, options, scale, inverse);
    Fp8Quantize({}, x, scale, options.format, by_scale, {}, {});
    Fp8QuantizeByAmax({}, x, options, scales, by_amax, {});
    EXPECT_EQ(by_amax.ToValues(), by_scale.ToValues()) << amax;
    EXPECT_EQ(scales[kFp8ScalePitch], scale[0]);
    EXPECT_EQ(scales[2 * kFp8ScalePitch], inverse[0]);
  }
}

// The code of the nearest value, of two equally near ones the even code; the largest value's for what is beyond.
double NearestCode(double x, Fp8Format format) {
  static const auto values_of = [](Fp8Format of, int count) {
    Values values(count);
    for (int code = 0; code < count; ++code) values[code] = FromFp8(static_cast<uint8_t>(code), of);
    return values;
  };
  static const Values e4m3 = values_of(Fp8Format::kE4M3, 0x7f), e5m2 = values_of(Fp8Format::kE5M2, 0x7c);
  const Values& values = format == Fp8Format::kE4M3 ? e4m3 : e5m2;
  const double magnitude = std::min(std::fabs(x), values.back());
  const auto high = std::lower_bound(values.begin(), values.end(), magnitude) - values.begin(), low = high > 0 ? high - 1 : 0;
  const double below = magnitude - values[low], above = values[high] - magnitude;
  const auto code = below < above || (below == above && low % 2 == 0) ? low : high;
  return static_cast<double>(code + (std::signbit(x) ? 0x80 : 0));
}

Values Transposed(const Values& x, int64_t rows, int64_t cols) {
  Values transposed(x.size());
  for (int64_t i = 0; i < rows * cols; ++i) transposed[i % cols * rows + i / cols] = x[i];
  return transposed;
}

double LargestMagnitude(const Values& x) {
  double largest = 0;
  for (const double value : x) largest = std::max(largest, std::fabs(value));
  return largest;
}

// As fp8_gemm.h says. A quotient of F32 values that is rounded to double before F32 is the quotient that is rounded once.
double ScaleReference(double amax, const Fp8ScaleOptions& options) {
  if (!(amax > 0) || std::isinf(amax)) return 1;
  const double wanted = LargestOf(options.format) / amax * std::exp2(-options.margin);
  const double scale = test::RoundTo(DType::kF32, std::min<double>(wanted, std::numeric_limits<float>::max()));
  return options.power_of_two ? std::exp2(std::ilogb(scale)) : scale;
}

// All results are exact: scale, inverse and product are rounded to F32 once each, the product then to its code.
void CheckByAmax(const Owned& x, double amax, const Fp8ScaleOptions& options, bool want_rows = true, bool want_columns = true) {
  const int64_t rows = x.tensor().shape[0], cols = x.tensor().shape[1];
  const double scale = ScaleReference(amax, options);
  Values expected(3 * kFp8ScalePitch, 5.0), codes(rows * cols);
  expected[0] = amax;
  const Owned scales(DType::kF32, {3, kFp8ScalePitch}, expected);
  expected[kFp8ScalePitch] = scale;
  expected[2 * kFp8ScalePitch] = test::RoundTo(DType::kF32, 1 / scale);
  for (int64_t i = 0; i < rows * cols; ++i) codes[i] = NearestCode(test::RoundTo(DType::kF32, x[i] * scale), options.format);
  const Owned rowwise(DType::kU8, {rows, cols}), columnwise(DType::kU8, {cols, rows});
  Fp8QuantizeByAmax({}, x, options, scales, want_rows ? rowwise.tensor() : Tensor(),
                    want_columns ? columnwise.tensor() : Tensor());
  EXPECT_EQ(scales.ToValues(), expected);
  if (want_rows) {
    EXPECT_EQ(rowwise.ToValues(), codes);
  }
  if (want_columns) {
    EXPECT_EQ(columnwise.ToValues(), Transposed(codes, rows, cols));
  }
}

TEST(Fp8Test, CurrentScalingMatchesADoubleReference) {
  constexpr double kTiny = 0x1p-139;  // Makes subnormal numbers; their scale would be beyond F32.
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 16}, {16, 272}, {272, 16}, {48, 144}, {0, 32}, {32, 0}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Values values = test::SpreadValues(rows * cols, 1, 12), tiny = values;
      for (double& x : tiny) x *= kTiny;
      const Owned x(dtype, {rows, cols}, values), x_tiny(dtype, {rows, cols}, tiny), zeros(dtype, {rows, cols});
      const double amax = std::max(LargestMagnitude(x.ToValues()), 1.0);
      for (const Fp8ScaleOptions& options :
           {Fp8ScaleOptions{}, {.format = Fp8Format::kE5M2, .margin = 2}, {.margin = 1, .power_of_two = true}}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << cols << ' ' << NameOf(dtype) << " margin " << options.margin);
        CheckByAmax(x, amax, options);
        CheckByAmax(x, amax, options, true, false);
        CheckByAmax(x, amax, options, false, true);
        CheckByAmax(x, test::RoundTo(DType::kF32, 2.9 * amax), options);
        CheckByAmax(x, INFINITY, options);  // Scale 1: values beyond the format's end.
        CheckByAmax(x_tiny, test::RoundTo(DType::kF32, 1e-38), options);
        CheckByAmax(zeros, 0, options);
      }
    }
  }
}

TEST(Fp8Test, DelayedScalesRollTheHistory) {
  const Owned history(DType::kF32, {3, 2}, {1, 7, 4, 2, 2, 5}), scale(DType::kF32, {2}),
      inverse(DType::kF32, {2, kFp8ScalePitch});
  Fp8DelayedScales({}, history, false, {}, scale, inverse);
  EXPECT_EQ(scale.ToValues(), (Values{112, 64}));
  EXPECT_EQ(inverse[kFp8ScalePitch], 1.0 / 64);
  EXPECT_EQ(history.ToValues(), (Values{0, 0, 2, 5, 1, 7}));
  const Owned other(DType::kF32, {3, 2}, {1, 7, 4, 2, 2, 5});
  Fp8DelayedScales({}, other, true, {}, scale, inverse);
  EXPECT_EQ(scale.ToValues(), (Values{448, 64}));
}

TEST(Fp8Test, ProductsRefuseScalesThatCublasRefuses) {
  const Owned a(DType::kU8, {16, 16}), b(DType::kU8, {16, 16}), c(DType::kF32, {16, 16}), scales(DType::kF32, {8});
  const auto matrix = [](const Owned& x, const float* inverse) {
    return Fp8Matrix{x.tensor().data, Fp8Format::kE4M3, inverse, 16, 16, 16};
  };
  const float* aligned = scales.tensor().as<float>();
  Fp8Gemm({}, matrix(a, aligned), matrix(b, aligned + 4), AsMatrix(c), {});
  EXPECT_THROW(Fp8Gemm({}, matrix(a, aligned), matrix(b, aligned + 1), AsMatrix(c), {}), EngineError);
  EXPECT_THROW(Fp8Gemm({}, matrix(a, aligned + 2), matrix(b, aligned), AsMatrix(c), {}), EngineError);
}

TEST(Fp8Test, ProductsStayNearTheExactOnes) {
  constexpr int64_t kM = 16, kN = 32, kK = 48;
  const Owned a(DType::kBF16, {kM, kK}, test::RandomValues(kM * kK, 1)),
      b(DType::kBF16, {kN, kK}, test::RandomValues(kN * kK, 2));
  const Owned a_amax(DType::kF32, {1}), b_amax(DType::kF32, {1}), scale(DType::kF32, {1}),
      a_inverse(DType::kF32, {1, kFp8ScalePitch}), b_inverse(DType::kF32, {1, kFp8ScalePitch});
  const Owned a8(DType::kU8, {kM, kK}), a8_columns(DType::kU8, {kK, kM}), b8(DType::kU8, {kN, kK});
  Fp8Amax({}, a, a_amax);
  ScalesOf(a_amax.ToValues(), {}, scale, a_inverse);
  Fp8Quantize({}, a, scale, Fp8Format::kE4M3, a8, a8_columns, {});
  Fp8Amax({}, b, b_amax);
  ScalesOf(b_amax.ToValues(), {}, scale, b_inverse);
  Fp8Quantize({}, b, scale, Fp8Format::kE4M3, b8, {}, b_amax);
  for (int64_t i = 0; i < kM * kK; ++i) EXPECT_EQ(a8[i], a8_columns[i % kK * kM + i / kK]);
  const Fp8Matrix left{a8.tensor().data, Fp8Format::kE4M3, a_inverse.tensor().as<float>(), kM, kK, kK};
  const Fp8Matrix right{b8.tensor().data, Fp8Format::kE4M3, b_inverse.tensor().as<float>(), kN, kK, kK};
  const Owned c(DType::kF32, {kM, kN}, Values(kM * kN, 1.0)), exact(DType::kF32, {kM, kN}, Values(kM * kN, 1.0));
  Fp8Gemm({}, left, right, AsMatrix(c), {.accumulate = true});
  Gemm({}, AsMatrix(a), AsMatrix(b), AsMatrix(exact), {.transpose_b = true, .accumulate = true});
  test::ExpectNear(c.ToValues(), exact.ToValues(), 0.0, 0.35);  // 48 products with 2^-4 relative rounding each at most.
  EXPECT_THROW(Fp8Gemm({}, left, right, ColumnsOf(AsMatrix(c), 0, 16), {}), EngineError);
  Fp8Matrix wide = left, wide_right = right;
  wide.format = wide_right.format = Fp8Format::kE5M2;
  EXPECT_THROW(Fp8Gemm({}, wide, wide_right, AsMatrix(c), {}), EngineError);
}

struct Blockwise {
  Values codes, scales;
};

// Of x [rows, cols]; what belongs to the transpose is this of the transposed values. A division by a power of two is exact, and
// so are the codes.
Blockwise BlockwiseReference(const Values& x, int64_t rows, int64_t cols, Fp8Format format, bool squares) {
  const int64_t height = squares ? kFp8Block : 1;
  const Fp8Scaling scaling = squares ? Fp8Scaling::kSquares : Fp8Scaling::kVectors;
  Blockwise result{Values(rows * cols), Values(Fp8ScaleCount(scaling, rows, cols))};
  for (int64_t row = 0; row < rows; row += height) {
    for (int64_t col = 0; col < cols; col += kFp8Block) {
      const auto for_each = [&](auto&& f) {
        for (int64_t i = 0; i < height * kFp8Block; ++i) f((row + i / kFp8Block) * cols + col + i % kFp8Block);
      };
      double amax = 0, scale = amax;
      for_each([&](int64_t i) { amax = std::max(amax, std::fabs(x[i])); });
      for (scale = amax > 0 ? 0x1p-126 : 1; scale * LargestOf(format) < amax; scale *= 2) continue;
      const int64_t across = col / kFp8Block, pitch = (cols / kFp8Block + 3) / 4 * 4;
      result.scales[squares ? row / kFp8Block * pitch + across : across * rows + row] = scale;
      for_each([&](int64_t i) { result.codes[i] = NearestCode(x[i] / scale, format); });
    }
  }
  return result;
}

// Squares of very different sizes, one of them zeros; rows of zeros, of values that a scale just holds and just does not hold,
// and of subnormal ones.
Values UnevenBlocks(int64_t rows, int64_t cols, double above) {
  Values values = test::SpreadValues(rows * cols, 3, 12);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t row = i / cols, down = row / kFp8Block, across = i % cols / kFp8Block;
    values[i] *= std::exp2((down * 5 + across * 7) % 4 - 2.0);
    if (down + across == 1 || row == 5) values[i] = 0;
    if (row == 7 || row == 9) values[i] = 0.3 * static_cast<double>(i % 11);
    if (row == 11) values[i] *= 0x1p-139;
  }
  for (int64_t col = 50; col < cols; col += kFp8Block) values[7 * cols + col] = 448, values[9 * cols + col] = above;
  return values;
}

TEST(Fp8Test, BlockwiseCopiesMatchADoubleReference) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{128, 128}, {128, 640}, {384, 256}}) {
    for (const auto& [dtype, above] : {std::pair{DType::kBF16, 450.0}, {DType::kF16, 448.25}, {DType::kF32, 448.0 + 0x1p-15}}) {
      if (test::g_on_device && dtype == DType::kF32) continue;  // CUDA takes 16-bit values only.
      const Owned x(dtype, {rows, cols}, UnevenBlocks(rows, cols, above));
      const Values values = x.ToValues(), turned = Transposed(values, rows, cols);
      for (const bool squares : {false, true}) {
        for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
          SCOPED_TRACE(testing::Message() << rows << " x " << cols << ' ' << NameOf(dtype) << (squares ? " squares" : ""));
          const Blockwise expected = BlockwiseReference(values, rows, cols, format, squares);
          const Blockwise expected_turned = BlockwiseReference(turned, cols, rows, format, squares);
          struct Copy {
            explicit Copy(const Blockwise& like)
                : codes(DType::kU8, {static_cast<int64_t>(like.codes.size())}),
                  scales(DType::kF32, {static_cast<int64_t>(like.scales.size())}) {}
            Owned codes, scales;
          };
          const Copy copy(expected), turned_copy(expected_turned), only(expected), only_turned(expected_turned);
          Fp8BlockQuantize({}, x, format, squares, copy.codes, copy.scales, turned_copy.codes, turned_copy.scales);
          Fp8BlockQuantize({}, x, format, squares, only.codes, only.scales, {}, {});
          Fp8BlockQuantize({}, x, format, squares, {}, {}, only_turned.codes, only_turned.scales);
          for (const Copy* made : {&copy, &only}) {
            EXPECT_EQ(made->codes.ToValues(), expected.codes);
            EXPECT_EQ(made->scales.ToValues(), expected.scales);
          }
          for (const Copy* made : {&turned_copy, &only_turned}) {
            EXPECT_EQ(made->codes.ToValues(), expected_turned.codes);
            EXPECT_EQ(made->scales.ToValues(), expected_turned.scales);
          }
        }
      }
    }
  }
}

TEST(Fp8Test, BlockwiseCopiesOfNothing) {
  const Owned x(DType::kBF16, {0, 256}), codes(DType::kU8, {2, 256}, Values(512, 7.0)), scales(DType::kF32, {8}, Values(8, 3.0));
  const Tensor no_codes = codes.tensor().Rows(1, 0), no_scales = scales.tensor().Rows(4, 0);
  for (const bool squares : {false, true}) {
    Fp8BlockQuantize({}, x, Fp8Format::kE4M3, squares, no_codes, no_scales, no_codes, no_scales);
  }
  EXPECT_EQ(codes.ToValues(), Values(512, 7.0));
  EXPECT_EQ(scales.ToValues(), Values(8, 3.0));
}

// An operand of a blockwise product, made without the operator that quantises: codes and powers of two, each at random.
struct BlockOperand {
  BlockOperand(int64_t rows, int64_t cols, Fp8Format format, Fp8Scaling scaling, uint32_t seed)
      : codes(DType::kU8, {rows, cols}, Codes(rows * cols, seed, format)),
        scales(DType::kF32, {Fp8ScaleCount(scaling, rows, cols)}),
        matrix{codes.tensor().data, format, scales.tensor().as<float>(), rows, cols, cols, scaling} {
    const Values exponents = test::RandomValues(scales.tensor().size(), seed + 1, 5.0);
    for (int64_t i = 0; i < scales.tensor().size(); ++i) scales.Set(i, std::exp2(std::rint(exponents[i])));
  }
  static Values Codes(int64_t count, uint32_t seed, Fp8Format format) {
    Values codes = test::RandomValues(count, seed);
    for (double& x : codes) x = NearestCode(x, format);
    return codes;
  }
  // What element [row, col] stands for.
  double At(int64_t row, int64_t col) const {
    const int64_t across = col / kFp8Block, pitch = (matrix.cols / kFp8Block + 3) / 4 * 4;
    const double scale =
        scales[matrix.scaling == Fp8Scaling::kSquares ? row / kFp8Block * pitch + across : across * matrix.rows + row];
    return FromFp8(static_cast<uint8_t>(codes[row * matrix.cols + col]), matrix.format) * scale;
  }
  Owned codes, scales;
  Fp8Matrix matrix;
};

void CheckBlockProducts(const BlockOperand& a, const BlockOperand& b) {
  const int64_t m = a.matrix.rows, n = b.matrix.rows, k = a.matrix.cols;
  Values left(m * k), right(n * k), products(m * n), magnitudes(m * n);
  for (int64_t i = 0; i < m * k; ++i) left[i] = a.At(i / k, i % k);
  for (int64_t i = 0; i < n * k; ++i) right[i] = b.At(i / k, i % k);
  for (int64_t i = 0; i < m * n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      const double product = left[i / n * k + j] * right[i % n * k + j];
      products[i] += product;
      magnitudes[i] += std::fabs(product);
    }
  }
  // F32 sums of k terms. Tensor cores keep 13 bits after the point of the largest of each 128 terms, which is some four times
  // their mean: 2^-13 of it is lost 128 times at most.
  const double of_sums = test::g_on_device ? 0x1p-11 : static_cast<double>(k) * 0x1p-24;
  const Values before = test::RandomValues(m * n, 9);
  for (const auto& [out, accumulate] : {std::pair{DType::kBF16, false}, {DType::kF32, false}, {DType::kF32, true}}) {
    const Owned c(out, {m, n}, before);
    Fp8Gemm({}, a.matrix, b.matrix, AsMatrix(c), {.accumulate = accumulate});
    Values actual(m * n), expected(m * n);
    for (int64_t i = 0; i < m * n; ++i) {
      // As shares of the sum of magnitudes, to which the sums' errors belong.
      const double first = accumulate ? before[i] : 0, all = std::fabs(first) + magnitudes[i];
      actual[i] = c[i] / all;
      expected[i] = (first + products[i]) / all;
    }
    test::ExpectNear(actual, expected, test::Kind{out, out}.epsilon(), of_sums);
  }
}

TEST(Fp8Test, BlockwiseProductsMatchADoubleReference) {
  bool available = false, again = true;
  Fp8BlockProducts({}, &available);
  Fp8BlockProducts({}, &again);
  EXPECT_EQ(available, again);  // Whatever stood there.
  if (!test::g_on_device) {
    EXPECT_TRUE(available);
  }
  if (!available) GTEST_SKIP() << "no products with scales of blocks here";
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{128, 128, 128}, {128, 256, 640}}) {
    for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
      for (const Fp8Scaling scaling : {Fp8Scaling::kSquares, Fp8Scaling::kVectors}) {
        SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << " scaling " << static_cast<int>(scaling));
        const BlockOperand a(m, k, format, Fp8Scaling::kVectors, 1), b(n, k, Fp8Format::kE4M3, scaling, 3);
        CheckBlockProducts(a, b);
      }
    }
  }
}

TEST(Fp8Test, RefusesOddShapes) {
  const Owned x(DType::kBF16, {16, 24}), scale(DType::kF32, {1}), out(DType::kU8, {16, 24}),
      scales(DType::kF32, {3, kFp8ScalePitch});
  EXPECT_THROW(Fp8Quantize({}, x, scale, Fp8Format::kE4M3, out, {}, {}), EngineError);
  EXPECT_THROW(Fp8QuantizeByAmax({}, x, {}, scales, out, {}), EngineError);
  const Owned half(DType::kBF16, {128, 64}), whole(DType::kBF16, {128, 128}), codes(DType::kU8, {128, 128}),
      few(DType::kF32, {127}), enough(DType::kF32, {128});
  const auto quantize = [](const Owned& from, const Tensor& to, const Tensor& of_blocks) {
    Fp8BlockQuantize({}, from, Fp8Format::kE4M3, false, to, of_blocks, {}, {});
  };
  EXPECT_THROW(quantize(half, codes, enough), EngineError);
  EXPECT_THROW(quantize(whole, codes, few), EngineError);
  EXPECT_THROW(quantize(whole, codes, {}), EngineError);
  EXPECT_THROW(quantize(whole, out, enough), EngineError);
}

}  // namespace
}  // namespace mbridge
