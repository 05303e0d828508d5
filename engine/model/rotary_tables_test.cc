#include "engine/model/rotary_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace mbridge {
namespace {

TEST(RotaryTablesTest, FrequenciesOfLlama3) {
  GptConfig config;
  config.kv_channels = 8;
  config.rotary_base = 10000;
  // Wavelengths 6, 63, 628 and 6283 tokens.
  EXPECT_THAT(RotaryFrequencies(config), testing::Pointwise(testing::FloatNear(1e-9f), {1.0f, 0.1f, 0.01f, 0.001f}));
  config.rope_scaling = true;
  config.rope_scaling_factor = 8;
  config.rope_original_length = 1000;
  // Below 250 tokens they stay, above 1000 they are stretched by 8, in between: smooth = (1000 / 628.3185 - 1) / 3.
  const auto smooth = static_cast<float>((1000 / 628.31853 - 1) / 3);
  EXPECT_THAT(RotaryFrequencies(config),
              testing::Pointwise(testing::FloatNear(1e-8f), {1.0f, 0.1f, (1 - smooth) * 0.01f / 8 + smooth * 0.01f, 0.001f / 8}));
}

TEST(RotaryTablesTest, PositionsAreStretchedAndTablesRounded) {
  GptConfig config;
  config.kv_channels = 6;
  config.rotary_percent = 0.7;  // Four of six elements.
  config.rotary_base = 100;
  config.seq_len_interpolation_factor = 4;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    config.dtype = dtype;
    std::vector<float> memory(12);
    const Tensor cosine{memory.data(), DType::kF32, DeviceType::kCpu, {3, 2}},
        sine{memory.data() + 6, DType::kF32, DeviceType::kCpu, {3, 2}};
    FillRotaryTables(config, cosine, sine);
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 2; ++j) {
        const double angle = i / 4.0 * (j == 0 ? 1.0 : 0.1), error = dtype == DType::kF32 ? 1e-7 : 1.0 / 256;
        EXPECT_NEAR(memory[i * 2 + j], std::cos(angle), error);
        EXPECT_NEAR(memory[6 + i * 2 + j], std::sin(angle), error);
        if (dtype == DType::kBF16) {
          EXPECT_EQ(ToFloat(ToBFloat16(memory[6 + i * 2 + j])), memory[6 + i * 2 + j]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mbridge
