// Blends of several corpora: weights, sizes and the order of samples (blended_dataset.py, helpers.cpp).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge {

// A command-line data list, taken apart.
struct BlendList {
  std::vector<std::string> prefixes;
  std::optional<std::vector<double>> weights;  // Positive and finite, one a prefix.
};
// An even count with numbers at the even places is weight, prefix, …; otherwise prefixes only. `field` names the key in errors.
absl::StatusOr<BlendList> ParseBlendList(const std::string& field, const std::vector<std::string>& list);

// weights / sum, with the order of additions of numpy.sum (plain up to 7 terms, then eight accumulators).
std::vector<double> NormalizeWeights(std::span<const double> weights);

// Samples that a part must hold for `size` blended ones: ceil(ceil(size * weight) * (1 + surplus)); weight normalized once.
int64_t SamplesOfPart(double weight, int64_t size, double surplus);

struct BlendIndex {
  std::vector<int16_t> dataset;         // Which part, per blended sample.
  std::vector<int64_t> dataset_sample;  // Its running sample number there.
};
// Sample i goes to the part with the largest weight * max(i, 1) - count, ties to the lowest number; product and
// difference are rounded separately. `weights` are normalized (twice for given weights). At most 32767 parts.
BlendIndex BuildBlendIndex(std::span<const double> weights, int64_t size);
// All samples of all parts: the same rule with weight = size / sum among the parts that are not used up.
BlendIndex BuildExhaustiveBlendIndex(std::span<const int64_t> sizes);

}  // namespace mbridge
