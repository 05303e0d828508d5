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

// 16 elements, base 10000; expected values computed apart in double precision from the formulas of the papers (a step of F32 is
// 1.5e-8 near 0.24).
GptConfig SixteenElements() {
  GptConfig config;
  config.kv_channels = 16;
  config.rotary_base = 10000;
  return config;
}

TEST(RotaryTablesTest, DynamicScalingGrowsTheBaseOfLongSequences) {
  GptConfig config = SixteenElements();
  const std::vector<float> plain = RotaryFrequencies(config);
  config.rope_dynamic_factor = 2;
  config.rope_original_length = 16;
  config.seq_length = 16;
  EXPECT_EQ(RotaryFrequencies(config), plain);
  config.seq_length = 64;  // The base grows by (2 * 64 / 16 - 1)^(16 / 14).
  EXPECT_THAT(RotaryFrequencies(config),
              testing::Pointwise(testing::FloatNear(2e-7f), {1.0f, 0.239481356f, 0.0573513199f, 0.0137345719f, 3.28917389e-3f,
                                                             7.87695824e-4f, 1.88638464e-4f, 4.51753951e-5f}));
}

TEST(RotaryTablesTest, YarnBlendsBetweenTheLimits) {
  GptConfig config = SixteenElements();
  config.yarn_rotary_scaling_factor = 4;
  config.rope_original_length = 4096;  // Pairs 2.6 and 5.6 turn 32 times and once.
  EXPECT_THAT(RotaryFrequencies(config),
              testing::Pointwise(testing::FloatNear(1e-8f),
                                 {1.0f, 0.316227766f, 0.1f, 0.025693506f, 6.25e-3f, 1.38349648e-3f, 2.5e-4f, 7.90569415e-5f}));
  config.yarn_correction_range_round_to_int = false;
  EXPECT_THAT(RotaryFrequencies(config),
              testing::Pointwise(testing::FloatNear(1e-8f), {1.0f, 0.316227766f, 0.1f, 0.0286136088f, 6.55697152e-3f,
                                                             1.28563203e-3f, 2.5e-4f, 7.90569415e-5f}));
  config.yarn_correction_range_round_to_int = true;
  config.rope_original_length = 64;  // The lower limit lies before the first pair.
  EXPECT_THAT(RotaryFrequencies(config),
              testing::Pointwise(testing::FloatNear(2e-8f),
                                 {1.0f, 0.237170825f, 0.05f, 7.90569415e-3f, 2.5e-3f, 7.90569415e-4f, 2.5e-4f, 7.90569415e-5f}));
}

TEST(RotaryTablesTest, YarnAttentionFactorNeedsBothMscales) {
  EXPECT_NEAR(YarnAttentionFactor(4, 0, 0), 1.13862943611, 1e-10);
  EXPECT_NEAR(YarnAttentionFactor(4, 0.7, 0), 1.13862943611, 1e-10);
  EXPECT_NEAR(YarnAttentionFactor(40, 0.707, 0.5), 1.06446890394, 1e-10);
  EXPECT_EQ(YarnAttentionFactor(0.5, 1, 1), 1.0);
}

TEST(RotaryTablesTest, LongRopeChoosesItsFactorsByTheLength) {
  GptConfig config;
  config.kv_channels = 4;
  config.rotary_base = 100;
  config.rope_original_length = 32;
  config.long_rope_short_factors = {1.0, 2.0};
  config.long_rope_long_factors = {4.0, 5.0};
  config.seq_length = 32;
  EXPECT_THAT(RotaryFrequencies(config), testing::Pointwise(testing::FloatNear(1e-8f), {1.0f, 0.05f}));
  config.seq_length = 33;
  EXPECT_THAT(RotaryFrequencies(config), testing::Pointwise(testing::FloatNear(1e-8f), {0.25f, 0.02f}));
}

TEST(RotaryTablesTest, AttentionFactorAndLocalBase) {
  GptConfig config;
  config.kv_channels = 2;
  config.yarn_rotary_scaling_factor = 4;
  config.rope_attention_factor = 1.5;
  config.dtype = DType::kF32;
  std::vector<float> memory(2);
  FillRotaryTables(config, {&memory[0], DType::kF32, DeviceType::kCpu, {1, 1}},
                   {&memory[1], DType::kF32, DeviceType::kCpu, {1, 1}});
  EXPECT_EQ(memory, (std::vector<float>{1.5f, 0.0f}));
  config.rotary_base_local = 100;
  const GptConfig local = LocalRotaryConfig(config);
  EXPECT_EQ(local.rotary_base, 100);
  EXPECT_EQ(local.yarn_rotary_scaling_factor, 0);
  EXPECT_EQ(local.rope_attention_factor, 1);
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
