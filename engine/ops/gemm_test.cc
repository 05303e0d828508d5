#include "engine/ops/gemm.h"

#include "engine/ops/test_bounds.h"

namespace mbridge {
namespace {

using test::Bounded;
using test::Bounds;
using test::Owned;
using test::Values;

constexpr int64_t kM = 7, kN = 13, kK = 19;

// alpha op(a) op(b) in double.
Values Reference(const Values& a, const Values& b, const GemmOptions& options) {
  Values c(kM * kN);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < kK; ++k) {
        sum += (options.transpose_a ? a[k * kM + i] : a[i * kK + k]) * (options.transpose_b ? b[j * kK + k] : b[k * kN + j]);
      }
      c[i * kN + j] = options.alpha * sum;
    }
  }
  return c;
}

Matrix MatrixOf(const Owned& owned, int64_t rows, int64_t cols) {
  return {owned.tensor().data, owned.tensor().dtype, rows, cols, cols};
}

TEST(GemmTest, EveryTypeAndTransposition) {
  for (DType in : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (int flags = 0; flags < 4; ++flags) {
        const GemmOptions options{.transpose_a = (flags & 1) != 0, .transpose_b = (flags & 2) != 0, .alpha = 0.5f};
        const Values a = test::RandomValues(kM * kK, 1), b = test::RandomValues(kK * kN, 2);
        const Owned a_data(in, {kM * kK}, a), b_data(in, {kK * kN}, b), c_data(out, {kM * kN});
        Gemm({}, options.transpose_a ? MatrixOf(a_data, kK, kM) : MatrixOf(a_data, kM, kK),
             options.transpose_b ? MatrixOf(b_data, kN, kK) : MatrixOf(b_data, kK, kN), MatrixOf(c_data, kM, kN), options);
        const double step = out == DType::kBF16 ? 1.0 / 256 : out == DType::kF16 ? 1.0 / 2048 : 1e-6;
        test::ExpectNear(c_data.ToValues(), Reference(a_data.ToValues(), b_data.ToValues(), options), step, 2e-6);
      }
    }
  }
}

TEST(GemmTest, NarrowResultsAreRoundedOnce) {
  const Owned a(DType::kBF16, {kM * kK}, test::RandomValues(kM * kK, 3)),
      b(DType::kBF16, {kK * kN}, test::RandomValues(kK * kN, 4));
  const Owned narrow(DType::kBF16, {kM * kN}), wide(DType::kF32, {kM * kN});
  Gemm({}, MatrixOf(a, kM, kK), MatrixOf(b, kK, kN), MatrixOf(narrow, kM, kN), {});
  Gemm({}, MatrixOf(a, kM, kK), MatrixOf(b, kK, kN), MatrixOf(wide, kM, kN), {});
  for (int64_t i = 0; i < kM * kN; ++i) EXPECT_EQ(narrow[i], test::RoundTo(DType::kBF16, wide[i])) << i;
}

TEST(GemmTest, AccumulatesIntoWindows) {
  for (DType in : {DType::kF32, DType::kBF16}) {
    const Values a = test::RandomValues(kM * kK, 5), b = test::RandomValues(kK * kN, 6);
    const Owned a_data(in, {kM * kK}, a), b_data(in, {kK, kN}, b);
    Owned c(DType::kF32, {kM, kN + 3}, Values(kM * (kN + 3), 1.0));
    const Matrix window = ColumnsOf(AsMatrix(c), 2, kN);
    // The product of two row blocks of b, added up.
    const Matrix a_matrix = MatrixOf(a_data, kM, kK), b_matrix = AsMatrix(b_data);
    Gemm({}, ColumnsOf(a_matrix, 0, 8), RowsOf(b_matrix, 0, 8), window, {});
    Gemm({}, ColumnsOf(a_matrix, 8, kK - 8), RowsOf(b_matrix, 8, kK - 8), window, {.accumulate = true});
    const Values expected = Reference(a, b, {});
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j < kN + 3; ++j) {
        const bool inside = j >= 2 && j < kN + 2;
        EXPECT_NEAR(c[i * (kN + 3) + j], inside ? expected[i * kN + j - 2] : 1.0, 2e-6);
      }
    }
  }
}

// Rows 4 KiB apart take a way of their own.
TEST(GemmTest, WideTransposedRows) {
  constexpr int64_t kRows = 520, kCols = 1024, kNarrow = 3;
  const Values a = test::RandomValues(kRows * kCols, 7), b = test::RandomValues(kRows * kNarrow, 8);
  const Owned a_data(DType::kF32, {kRows, kCols}, a), b_data(DType::kF32, {kRows, kNarrow}, b), c(DType::kF32, {kCols, kNarrow});
  Gemm({}, AsMatrix(a_data), AsMatrix(b_data), AsMatrix(c), {.transpose_a = true});
  for (int64_t i = 0; i < kCols; i += 101) {
    double sum = 0;
    for (int64_t k = 0; k < kRows; ++k) sum += a[k * kCols + i] * b[k * kNarrow + 2];
    EXPECT_NEAR(c[i * kNarrow + 2], sum, 2e-5) << i;
  }
}

TEST(GemmTest, RefusesWhatDoesNotFit) {
  const Owned a(DType::kF32, {6, 4}), b(DType::kF32, {5, 3}), c(DType::kBF16, {6, 3}), d(DType::kBF16, {4, 3});
  EXPECT_THROW(Gemm({}, AsMatrix(a), AsMatrix(b), AsMatrix(c), {}), EngineError);
  EXPECT_THROW(Gemm({}, AsMatrix(a), AsMatrix(d), AsMatrix(c), {}), EngineError);
  const Owned e(DType::kF32, {4, 3});
  EXPECT_THROW(Gemm({}, AsMatrix(a), AsMatrix(e), AsMatrix(c), {.accumulate = true}), EngineError);
  EXPECT_THROW(Gemm({.device = DeviceType::kCuda}, AsMatrix(a), AsMatrix(e), AsMatrix(c), {}), EngineError);
}

// In any order, and as tensor cores add.
void CheckNarrow(DType in, DType out, int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b) {
  const Values a = test::RandomValues(m * k, 1, 1.0, in), b = test::RandomValues(k * n, 2, 1.0, in);
  const Owned a_data(in, {m * k}, a), b_data(in, {k * n}, b), c(out, {m, n});
  Gemm({}, transpose_a ? MatrixOf(a_data, k, m) : MatrixOf(a_data, m, k),
       transpose_b ? MatrixOf(b_data, n, k) : MatrixOf(b_data, k, n), AsMatrix(c),
       {.transpose_a = transpose_a, .transpose_b = transpose_b, .alpha = 0.3f});
  Bounds expected;
  for (int64_t i = 0; i < m * n; ++i) {
    const int64_t row = i / n, column = i % n;
    test::Sum sum;
    for (int64_t l = 0; l < k; ++l) {
      sum.Add(Bounded(a[transpose_a ? l * m + row : row * k + l]) * b[transpose_b ? column * k + l : l * n + column]);
    }
    expected.push_back(Stored(sum.Total(test::kTensorCoreUnit) * 0.3f, out));
  }
  test::ExpectBounded(
      "Gemm over " + std::to_string(k) + (transpose_a ? ", a transposed" : "") + (transpose_b ? ", b transposed" : ""), {in, in},
      c, expected);
}

TEST(GemmTest, NarrowStorageWithinItsBounds) {
  struct Sizes {
    int64_t m, n, k;
  };
  for (const DType in : {DType::kBF16, DType::kF16}) {
    for (const DType out : {in, DType::kF32}) {
      for (const auto& [m, n, k] : {Sizes{1, 1, 1}, Sizes{3, 7, 5}, Sizes{33, 17, 127}, Sizes{24, 40, 264}, Sizes{1, 3, 2047}}) {
        for (const int flags : {0, 1, 2, 3}) CheckNarrow(in, out, m, n, k, (flags & 1) != 0, (flags & 2) != 0);
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
