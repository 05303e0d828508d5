#include "engine/model/rotary_tables.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/ops/convert.h"

namespace mbridge {
namespace {

float Scaled(const GptConfig& c, float frequency) {
  const auto factor = static_cast<float>(c.rope_scaling_factor);
  const double low = c.rope_low_freq_factor, high = c.rope_high_freq_factor, original = c.rope_original_length;
  const auto wavelength = static_cast<float>(2.0 * std::numbers::pi / frequency);
  if (wavelength < original / high) return frequency;
  if (wavelength > original / low) return frequency / factor;
  const auto smooth = static_cast<float>((original / wavelength - low) / (high - low));
  return (1.0f - smooth) * (frequency / factor) + smooth * frequency;
}

// Index of the pair that turns `turns` times within the original length.
double YarnPairOf(const GptConfig& c, double turns, int64_t width) {
  return static_cast<double>(width) * std::log(c.rope_original_length / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(c.rotary_base));
}

void ScaleByYarn(const GptConfig& c, int64_t width, std::vector<float>* frequencies) {
  double low = YarnPairOf(c, c.yarn_beta_fast, width), high = YarnPairOf(c, c.yarn_beta_slow, width);
  if (c.yarn_correction_range_round_to_int) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(width - 1));
  if (low == high) high += 0.001;
  const auto factor = static_cast<float>(c.yarn_rotary_scaling_factor);
  for (size_t i = 0; i < frequencies->size(); ++i) {
    const float ramp = static_cast<float>(std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0));
    float& frequency = (*frequencies)[i];
    frequency = frequency / factor * ramp + frequency * (1.0f - ramp);
  }
}

double Base(const GptConfig& c, int64_t width) {
  const auto length = static_cast<double>(c.seq_length), w = static_cast<double>(width);
  if (c.rope_dynamic_factor == 0 || length <= c.rope_original_length || width <= 2) return c.rotary_base;
  const double stretch = c.rope_dynamic_factor * length / c.rope_original_length - (c.rope_dynamic_factor - 1);
  return c.rotary_base * std::pow(stretch, w / (w - 2));
}

}  // namespace

int64_t RotaryWidth(const GptConfig& config) {
  return static_cast<int64_t>(
      static_cast<double>(config.multi_latent_attention ? config.qk_pos_emb_head_dim : config.kv_channels) *
      config.rotary_percent);
}

std::vector<float> RotaryFrequencies(const GptConfig& config) {
  const int64_t width = RotaryWidth(config);
  const double base = Base(config, width);
  const bool longer = static_cast<double>(config.seq_length) > config.rope_original_length;
  const std::vector<double>& divisors = longer ? config.long_rope_long_factors : config.long_rope_short_factors;
  std::vector<float> frequencies;
  for (int64_t i = 0; i < width; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(width);
    const auto period = static_cast<float>(std::pow(base, static_cast<double>(exponent)));
    const float frequency = 1.0f / (divisors.empty() ? period : static_cast<float>(divisors[i / 2]) * period);
    frequencies.push_back(config.rope_scaling ? Scaled(config, frequency) : frequency);
  }
  if (config.yarn_rotary_scaling_factor > 0) ScaleByYarn(config, width, &frequencies);
  return frequencies;
}

double YarnAttentionFactor(double factor, double mscale, double mscale_all_dim) {
  const auto scale = [factor](double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; };
  return mscale != 0 && mscale_all_dim != 0 ? scale(mscale) / scale(mscale_all_dim) : scale(1);
}

void FillRotaryTables(const GptConfig& config, const Tensor& cosine, const Tensor& sine) {
  const std::vector<float> frequencies = RotaryFrequencies(config);
  const auto half = static_cast<int64_t>(frequencies.size());
  const float stretch =
      config.seq_len_interpolation_factor > 0 ? static_cast<float>(1.0 / config.seq_len_interpolation_factor) : 1.0f;
  const auto factor = static_cast<float>(config.rope_attention_factor);
  for (int64_t i = 0; i < cosine.shape[0]; ++i) {
    for (int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<float>(i) * stretch * frequencies[j];
      cosine.as<float>()[i * half + j] = static_cast<float>(std::cos(angle)) * factor;
      sine.as<float>()[i * half + j] = static_cast<float>(std::sin(angle)) * factor;
    }
  }
  for (const Tensor& table : {cosine, sine}) Convert({}, table, config.dtype, table);
}

GptConfig LocalRotaryConfig(GptConfig config) {
  config.rotary_base = config.rotary_base_local;
  config.rope_scaling = false;
  config.seq_len_interpolation_factor = config.rope_dynamic_factor = config.yarn_rotary_scaling_factor = 0;
  config.long_rope_short_factors.clear();
  config.long_rope_long_factors.clear();
  config.rope_attention_factor = 1;
  return config;
}

}  // namespace mbridge
