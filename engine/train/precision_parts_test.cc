#include "engine/train/precision_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

GptConfig FourLayers(ScalingRecipe recipe) {
  GptConfig config;
  config.num_layers = 4;
  config.dtype = DType::kBF16;
  config.low_precision.recipe = recipe;
  return config;
}

TEST(DescribeLowPrecision, SaysWhatIsEmulatedAndWhatNativeProductsNeed) {
  for (const ScalingRecipe recipe : {ScalingRecipe::kMxfp8, ScalingRecipe::kNvfp4}) {
    EXPECT_THAT(DescribeLowPrecision(FourLayers(recipe), false),
                AllOf(HasSubstr("4 of 4 layers"), HasSubstr("by emulation"), HasSubstr("multiplied in BF16"),
                      HasSubstr("need sm_100; this version has none")));
  }
}

TEST(DescribeLowPrecision, NamesLayersApartAndNativeProducts) {
  GptConfig config = FourLayers(ScalingRecipe::kCurrent);
  config.low_precision.first_layers_apart = config.low_precision.last_layers_apart = 1;
  EXPECT_THAT(DescribeLowPrecision(config, true), AllOf(HasSubstr("2 of 4 layers"), HasSubstr("products of 8-bit operands")));
  EXPECT_THAT(DescribeLowPrecision(config, false), AllOf(HasSubstr("by emulation"), Not(HasSubstr("sm_100"))));
  config.low_precision = {};
  EXPECT_EQ(DescribeLowPrecision(config, true), "");
}

}  // namespace
}  // namespace mbridge
