// Which of several algorithms the trials of a matrix product speak for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace mbridge::cuda {

// Milliseconds of one algorithm, a trial a round; infinite where it refuses.
using TrialTimes = std::vector<float>;

inline float MedianOf(TrialTimes times) {
  if (times.empty()) return INFINITY;
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// The smallest median, if it beats the first algorithm's (cuBLASLt's own suggestion) by `margin` of it and wins three rounds in
// four against it; else the first. All have as many rounds, taken in turn: a drift of the clocks meets all of them.
inline size_t PickFastest(const std::vector<TrialTimes>& times, float margin) {
  size_t best = 0;
  const float first = MedianOf(times[0]);
  float fastest = std::isfinite(first) ? (1.0f - margin) * first : INFINITY;
  for (size_t i = 1; i < times.size(); ++i) {
    size_t wins = 0;
    for (size_t round = 0; round < times[i].size(); ++round) wins += times[i][round] < times[0][round] ? 1 : 0;
    const float median = MedianOf(times[i]);
    if (median < fastest && 4 * wins >= 3 * times[i].size()) {
      fastest = median;
      best = i;
    }
  }
  return best;
}

}  // namespace mbridge::cuda
