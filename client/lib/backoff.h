// Waiting times between tries: exponential with jitter, so that many clients of a restarted coordinator spread out.
#pragma once

#include <chrono>
#include <cstdint>

namespace mbridge::client {

// Not thread-safe; one object per retried operation.
class Backoff {
 public:
  // `seed` 0 takes one from the system.
  explicit Backoff(std::chrono::milliseconds first = std::chrono::milliseconds(100),
                   std::chrono::milliseconds last = std::chrono::milliseconds(5000), uint64_t seed = 0);
  // Uniform in [half, whole] of a bound that grows by 1.6 from `first` to `last`.
  std::chrono::milliseconds Next();
  void Reset() { bound_ms_ = first_ms_; }

 private:
  double first_ms_, last_ms_, bound_ms_;
  uint64_t state_;
};

}  // namespace mbridge::client
