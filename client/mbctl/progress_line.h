// The one line on a terminal that says how far a job is; redrawn at most five times a second.
#pragma once

#include <chrono>
#include <iosfwd>
#include <string>

#include "client/mbctl/terminal.h"
#include "mbridge/v1/metric.pb.h"

namespace mbridge::mbctl {

// "running  3/10 [███-------]  loss 10.1669  114.81 k tok/s  ETA 1s", at most `width` columns.
std::string FormatProgress(const std::string& state, const v1::MetricPoint& point, int width, bool unicode);

// Not thread-safe. Does nothing unless terminal.progress.
class ProgressLine {
 public:
  using Clock = std::chrono::steady_clock;
  ProgressLine(std::ostream& err, const Terminal& terminal) : err_(err), terminal_(terminal) {}
  ~ProgressLine() { Clear(); }

  void Update(const std::string& state, const v1::MetricPoint& point, Clock::time_point now = Clock::now());
  // Takes the line away, so that other text can be written; the next Update draws it again at once.
  void Clear();

 private:
  std::ostream& err_;
  Terminal terminal_;
  bool visible_ = false;
  Clock::time_point last_{};
};

}  // namespace mbridge::mbctl
