#include "client/lib/backoff.h"

#include <algorithm>
#include <random>

namespace mbridge::client {

Backoff::Backoff(std::chrono::milliseconds first, std::chrono::milliseconds last, uint64_t seed)
    : first_ms_(static_cast<double>(first.count())),
      last_ms_(static_cast<double>(last.count())),
      bound_ms_(first_ms_),
      state_(seed != 0 ? seed : std::random_device{}()) {}

std::chrono::milliseconds Backoff::Next() {
  std::minstd_rand generator(static_cast<uint32_t>(state_ % 2147483646 + 1));
  generator.discard(1);
  state_ = generator();
  const double fraction = 0.5 + 0.5 * static_cast<double>(state_) / 2147483647.0;
  const double wait = bound_ms_ * fraction;
  bound_ms_ = std::min(last_ms_, bound_ms_ * 1.6);
  return std::chrono::milliseconds(static_cast<int64_t>(wait));
}

}  // namespace mbridge::client
