#include "engine/model/rotary_tables.h"

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

}  // namespace

int64_t RotaryWidth(const GptConfig& config) {
  return static_cast<int64_t>(static_cast<double>(config.kv_channels) * config.rotary_percent);
}

std::vector<float> RotaryFrequencies(const GptConfig& config) {
  const int64_t width = RotaryWidth(config);
  std::vector<float> frequencies;
  for (int64_t i = 0; i < width; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(width);
    const float frequency = 1.0f / static_cast<float>(std::pow(config.rotary_base, static_cast<double>(exponent)));
    frequencies.push_back(config.rope_scaling ? Scaled(config, frequency) : frequency);
  }
  return frequencies;
}

void FillRotaryTables(const GptConfig& config, const Tensor& cosine, const Tensor& sine) {
  const std::vector<float> frequencies = RotaryFrequencies(config);
  const auto half = static_cast<int64_t>(frequencies.size());
  const float stretch =
      config.seq_len_interpolation_factor > 0 ? static_cast<float>(1.0 / config.seq_len_interpolation_factor) : 1.0f;
  for (int64_t i = 0; i < cosine.shape[0]; ++i) {
    for (int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<float>(i) * stretch * frequencies[j];
      cosine.as<float>()[i * half + j] = static_cast<float>(std::cos(angle));
      sine.as<float>()[i * half + j] = static_cast<float>(std::sin(angle));
    }
  }
  for (const Tensor& table : {cosine, sine}) Convert({}, table, config.dtype, table);
}

GptConfig LocalRotaryConfig(GptConfig config) {
  config.rotary_base = config.rotary_base_local;
  config.rope_scaling = false;
  config.seq_len_interpolation_factor = 0;
  return config;
}

}  // namespace mbridge
