#include "client/mbctl/progress_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "client/mbctl/output.h"
#include "proto/format/training_line.h"
#include "recipes/config/text_form.h"

namespace mbridge::mbctl {
namespace {

constexpr auto kRedrawInterval = std::chrono::milliseconds(200);
constexpr int kBarWidth = 20;

std::string Bar(double fraction, bool unicode) {
  const int full = static_cast<int>(std::floor(std::clamp(fraction, 0.0, 1.0) * kBarWidth));
  std::string bar;
  for (int i = 0; i < kBarWidth; ++i) bar += i < full ? (unicode ? "█" : "#") : (unicode ? "░" : "-");
  return bar;
}

}  // namespace

std::string FormatProgress(const std::string& state, const v1::MetricPoint& point, int width, bool unicode) {
  std::vector<std::string> parts = {state};
  if (point.total_steps() > 0) {
    const double fraction = static_cast<double>(point.step()) / static_cast<double>(point.total_steps());
    parts.push_back(fmt::format("{}/{} [{}]", point.step(), point.total_steps(), Bar(fraction, unicode)));
    if (point.step() > 0) {
      parts.push_back(std::isnan(point.lm_loss()) ? "loss NaN" : fmt::format("loss {:.4f}", point.lm_loss()));
      parts.push_back(recipes::FormatCount(point.tokens_per_second()) + " tok/s");
      parts.push_back("ETA " + FormatDuration(point.eta_seconds()));
    }
  }
  std::string line;
  for (const std::string& part : parts) {
    const std::string longer = line.empty() ? part : line + "  " + part;
    if (!line.empty() && static_cast<int>(DisplayWidth(longer)) >= width) break;
    line = longer;
  }
  return line;
}

void ProgressLine::Update(const std::string& state, const v1::MetricPoint& point, Clock::time_point now) {
  if (!terminal_.progress || (visible_ && now - last_ < kRedrawInterval)) return;
  err_ << "\r\x1b[K" << FormatProgress(state, point, terminal_.width, terminal_.unicode) << std::flush;
  visible_ = true;
  last_ = now;
}

void ProgressLine::Clear() {
  if (!visible_) return;
  err_ << "\r\x1b[K" << std::flush;
  visible_ = false;
}

}  // namespace mbridge::mbctl
