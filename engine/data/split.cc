#include "engine/data/split.h"

#include <charconv>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "engine/data/blend.h"
#include "engine/data/data_status.h"

namespace mbridge {

std::string_view NameOf(Split split) {
  constexpr std::string_view kNames[] = {"train", "valid", "test"};
  return kNames[static_cast<int>(split)];
}

absl::StatusOr<SplitMatrix> ParseSplit(const std::string& text) {
  const auto invalid = [&] {
    return InvalidDataSetting("dataset.split", fmt::format("'{}' is not a split; give up to three numbers >= 0 with a "
                                                           "positive sum, as '969, 30, 1' (train, validation, test)",
                                                           text));
  };
  std::vector<double> parts;
  for (size_t at = 0; at <= text.size();) {
    size_t end = text.find(',', at);
    if (end == std::string::npos) end = text.size();
    size_t first = at, last = end;
    while (first < last && std::isspace(static_cast<unsigned char>(text[first]))) ++first;
    while (last > first && std::isspace(static_cast<unsigned char>(text[last - 1]))) --last;
    double value;
    const auto result = std::from_chars(text.data() + first, text.data() + last, value);
    if (result.ec != std::errc() || result.ptr != text.data() + last || !std::isfinite(value) || value < 0) return invalid();
    parts.push_back(value);
    at = end + 1;
  }
  if (parts.size() > 3) return invalid();
  parts.resize(3, 0.0);
  if (!(parts[0] + parts[1] + parts[2] > 0)) return invalid();
  parts = NormalizeWeights(parts);
  SplitMatrix matrix;
  double begin = 0;
  for (int i = 0; i < 3; ++i) {
    const double end = begin + parts[i];
    if (end > begin) matrix[i] = {begin, end};
    begin = end;
  }
  return matrix;
}

SequenceRange RangeOf(const std::pair<double, double>& fractions, int64_t sequences) {
  const auto bound = [&](double fraction) {  // nearbyint rounds half to even in the default mode.
    return static_cast<int64_t>(std::nearbyint(fraction * static_cast<double>(sequences)));
  };
  return {bound(fractions.first), bound(fractions.second)};
}

int64_t SequencesNeeded(const std::pair<double, double>& fractions) {
  // A range longer than 1 always holds a rounded integer, so the answer is at most about 1 / width.
  int64_t count = 1;
  const int64_t limit = static_cast<int64_t>(std::min(2.0 / (fractions.second - fractions.first), 1e7)) + 2;
  while (count < limit) {
    const SequenceRange range = RangeOf(fractions, count);
    if (range.end > range.begin) break;
    ++count;
  }
  return count;
}

}  // namespace mbridge
