// Time for the state machine; tests move it by hand. Deadlines use the monotonic part only.
#pragma once

#include <chrono>
#include <functional>

#include "google/protobuf/timestamp.pb.h"

namespace mbridge::server {

using Monotonic = std::chrono::steady_clock::time_point;

struct Clock {
  std::function<Monotonic()> now = [] { return std::chrono::steady_clock::now(); };
  std::function<std::chrono::system_clock::time_point()> wall = [] { return std::chrono::system_clock::now(); };
};

inline google::protobuf::Timestamp ToTimestamp(std::chrono::system_clock::time_point time) {
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  google::protobuf::Timestamp timestamp;
  timestamp.set_seconds(nanoseconds / 1'000'000'000);
  timestamp.set_nanos(static_cast<int32_t>(nanoseconds % 1'000'000'000));
  return timestamp;
}

inline std::chrono::system_clock::time_point FromTimestamp(const google::protobuf::Timestamp& timestamp) {
  return std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(
      std::chrono::seconds(timestamp.seconds()) + std::chrono::nanoseconds(timestamp.nanos())));
}

}  // namespace mbridge::server
