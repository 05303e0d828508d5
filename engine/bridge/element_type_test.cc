#include "engine/bridge/element_type.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

namespace mbridge {
namespace {

TEST(ElementType, EightBitFloatsHaveTheirPublishedValues) {
  EXPECT_EQ(FromE4M3(0x7e), 448.0f);
  EXPECT_EQ(FromE4M3(0x01), std::ldexp(1.0f, -9));
  EXPECT_EQ(FromE4M3(0x38), 1.0f);
  EXPECT_EQ(FromE4M3(0xb8), -1.0f);
  EXPECT_TRUE(std::isnan(FromE4M3(0xff)));
  EXPECT_EQ(FromE5M2(0x7b), 57344.0f);
  EXPECT_EQ(FromE5M2(0x01), std::ldexp(1.0f, -16));
  EXPECT_EQ(FromE5M2(0x3c), 1.0f);
  EXPECT_TRUE(std::isinf(FromE5M2(0x7c)));
  EXPECT_TRUE(std::isnan(FromE5M2(0x7f)));
  EXPECT_EQ(FromE8M0(127), 1.0f);
  EXPECT_EQ(FromE8M0(130), 8.0f);
  EXPECT_TRUE(std::isnan(FromE8M0(255)));
}

TEST(ElementType, EightBitFloatsComeBackBitForBit) {
  for (const char* dtype : {"F8_E4M3", "F8_E5M2"}) {
    std::vector<uint8_t> bits(256), again(256);
    for (int i = 0; i < 256; ++i) bits[i] = static_cast<uint8_t>(i);
    std::vector<BFloat16> values(256);
    ASSERT_TRUE(ConvertElements(dtype, bits.data(), *ExactType(dtype), values.data(), 256));
    ASSERT_TRUE(ConvertToFormat(DType::kBF16, values.data(), dtype, again.data(), 256));
    for (int i = 0; i < 256; ++i) {
      if (!std::isnan(ToFloat(values[i]))) {
        EXPECT_EQ(bits[i], again[i]) << dtype;
      }
    }
  }
}

TEST(ElementType, NarrowingRoundsToNearestEven) {
  const std::vector<double> values = {1.0, 1.00390625, 1.01171875, 1e300, -0.0};
  std::vector<BFloat16> narrow(values.size());
  ASSERT_TRUE(ConvertElements("F64", values.data(), DType::kBF16, narrow.data(), 5));
  EXPECT_EQ(ToFloat(narrow[1]), 1.0f);
  EXPECT_EQ(ToFloat(narrow[2]), 1.015625f);
  EXPECT_TRUE(std::isinf(ToFloat(narrow[3])));
  EXPECT_TRUE(std::signbit(ToFloat(narrow[4])));

  const std::vector<float> more = {464.0f, 470.0f, 17.0f, 19.0f};
  std::vector<uint8_t> eight(4);
  ASSERT_TRUE(ConvertToFormat(DType::kF32, more.data(), "F8_E4M3", eight.data(), 4));
  EXPECT_EQ(FromE4M3(eight[1]), 448.0f);
  EXPECT_EQ(FromE4M3(eight[2]), 16.0f) << "tie to even";
  EXPECT_EQ(FromE4M3(eight[3]), 20.0f) << "tie to even";
}

TEST(ElementType, TypesThatHoldOthers) {
  EXPECT_EQ(WiderType(DType::kBF16, DType::kF32), DType::kF32);
  EXPECT_EQ(WiderType(DType::kBF16, DType::kF16), DType::kF32);
  EXPECT_EQ(WiderType(DType::kF64, DType::kBF16), DType::kF64);
  EXPECT_EQ(WiderType(DType::kI64, DType::kF32), std::nullopt);
  EXPECT_EQ(ExactType("U16"), std::nullopt);
  int64_t whole = 7;
  float into = 0;
  EXPECT_FALSE(ConvertElements("I64", &whole, DType::kF32, &into, 1));
}

}  // namespace
}  // namespace mbridge
