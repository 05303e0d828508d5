#include "engine/ops/fp8_gemm.h"

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

TEST(Fp8Test, RefusesOddShapes) {
  const Owned x(DType::kBF16, {16, 24}), scale(DType::kF32, {1}), out(DType::kU8, {16, 24});
  EXPECT_THROW(Fp8Quantize({}, x, scale, Fp8Format::kE4M3, out, {}, {}), EngineError);
}

}  // namespace
}  // namespace mbridge
