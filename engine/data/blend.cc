#include "engine/data/blend.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "engine/data/data_status.h"

namespace mbridge {
namespace {

std::optional<double> ParseNumber(const std::string& text) {
  double value;
  const char* begin = text.data();
  const char* end = begin + text.size();
  while (begin < end && *begin == ' ') ++begin;
  while (end > begin && end[-1] == ' ') --end;
  const auto result = std::from_chars(begin, end, value);
  if (begin == end || result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return value;
}

// numpy/_core/src/umath/loops_utils.h: pairwise summation with blocks of 128.
double NumpySum(const double* values, size_t count) {
  if (count < 8) {
    double sum = 0;
    for (size_t i = 0; i < count; ++i) sum += values[i];
    return sum;
  }
  if (count <= 128) {
    double lanes[8];
    std::copy(values, values + 8, lanes);
    size_t i = 8;
    for (; i < count - count % 8; i += 8) {
      for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
    }
    double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    for (; i < count; ++i) sum += values[i];
    return sum;
  }
  size_t half = count / 2;
  half -= half % 8;
  return NumpySum(values, half) + NumpySum(values + half, count - half);
}

}  // namespace

absl::StatusOr<BlendList> ParseBlendList(const std::string& field, const std::vector<std::string>& list) {
  BlendList blend;
  std::vector<double> weights;
  for (size_t i = 0; list.size() % 2 == 0 && i < list.size(); i += 2) {
    if (auto weight = ParseNumber(list[i])) weights.push_back(*weight);
  }
  if (list.empty() || weights.size() * 2 != list.size()) {
    blend.prefixes = list;
  } else {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!std::isfinite(weights[i]) || weights[i] <= 0) {
        return InvalidDataSetting(field, fmt::format("weight '{}' of '{}': must be a number above 0; leave a corpus out "
                                                     "instead of giving it no weight",
                                                     list[2 * i], list[2 * i + 1]));
      }
      blend.prefixes.push_back(list[2 * i + 1]);
    }
    blend.weights = std::move(weights);
  }
  for (const std::string& prefix : blend.prefixes) {
    if (prefix.empty()) return InvalidDataSetting(field, "an entry is empty; give the path prefix of a .bin/.idx pair");
  }
  if (blend.prefixes.size() > static_cast<size_t>(std::numeric_limits<int16_t>::max())) {
    return InvalidDataSetting(field, fmt::format("{} corpora; at most 32767", blend.prefixes.size()));
  }
  return blend;
}

std::vector<double> NormalizeWeights(std::span<const double> weights) {
  const double sum = NumpySum(weights.data(), weights.size());
  std::vector<double> normalized(weights.begin(), weights.end());
  for (double& weight : normalized) weight /= sum;
  return normalized;
}

int64_t SamplesOfPart(double weight, int64_t size, double surplus) {
  const double target = std::ceil(static_cast<double>(size) * weight);
  return static_cast<int64_t>(std::ceil(target * (1 + surplus)));
}

BlendIndex BuildBlendIndex(std::span<const double> weights, int64_t size) {
  BlendIndex index;
  index.dataset.resize(static_cast<size_t>(size));
  index.dataset_sample.resize(static_cast<size_t>(size));
  std::vector<int64_t> counts(weights.size(), 0);
  for (int64_t i = 0; i < size; ++i) {
    const double position = std::max(static_cast<double>(i), 1.0);
    size_t best = 0;
    double largest = weights[0] * position - static_cast<double>(counts[0]);
    for (size_t part = 1; part < weights.size(); ++part) {
      const double error = weights[part] * position - static_cast<double>(counts[part]);
      if (error > largest) {
        largest = error;
        best = part;
      }
    }
    index.dataset[i] = static_cast<int16_t>(best);
    index.dataset_sample[i] = counts[best]++;
  }
  return index;
}

BlendIndex BuildExhaustiveBlendIndex(std::span<const int64_t> sizes) {
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  BlendIndex index;
  index.dataset.resize(static_cast<size_t>(total));
  index.dataset_sample.resize(static_cast<size_t>(total));
  std::vector<double> weights(sizes.size());
  for (size_t part = 0; part < sizes.size(); ++part) {
    weights[part] = static_cast<double>(sizes[part]) / static_cast<double>(total);
  }
  std::vector<int64_t> counts(sizes.size(), 0);
  for (int64_t i = 0; i < total; ++i) {
    const double position = std::max(static_cast<double>(i), 1.0);
    size_t best = sizes.size();
    double largest = 0;
    for (size_t part = 0; part < sizes.size(); ++part) {
      if (counts[part] == sizes[part]) continue;
      const double error = weights[part] * position - static_cast<double>(counts[part]);
      if (best == sizes.size() || error > largest) {
        largest = error;
        best = part;
      }
    }
    index.dataset[i] = static_cast<int16_t>(best);
    index.dataset_sample[i] = counts[best]++;
  }
  return index;
}

}  // namespace mbridge
