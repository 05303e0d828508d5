// How a corpus is divided among train, validation and test (blended_megatron_dataset_config.py, …_builder.py).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"

namespace mbridge {

enum class Split { kTrain = 0, kValid = 1, kTest = 2 };
inline constexpr std::array<Split, 3> kSplits = {Split::kTrain, Split::kValid, Split::kTest};
std::string_view NameOf(Split split);  // "train", "valid", "test"

// Fractions [begin, end) of the corpus for each split; absent where the end is not above the begin.
using SplitMatrix = std::array<std::optional<std::pair<double, double>>, 3>;

// "969, 30, 1": up to three non-negative numbers with a positive sum; missing ones are 0. INVALID_ARGUMENT names dataset.split.
absl::StatusOr<SplitMatrix> ParseSplit(const std::string& text);

struct SequenceRange {
  int64_t begin = 0;
  int64_t end = 0;
};
// Both ends are round-half-to-even(fraction * sequences).
SequenceRange RangeOf(const std::pair<double, double>& fractions, int64_t sequences);
// Fewest sequences for which the split has one.
int64_t SequencesNeeded(const std::pair<double, double>& fractions);

}  // namespace mbridge
