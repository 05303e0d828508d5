#include "engine/optim/loss_scaler.h"

#include <algorithm>

namespace mbridge {

LossScaler::LossScaler(const LossScalerOptions& options)
    : options_(options), state_{options.initial_scale, 0, options.hysteresis} {}

void LossScaler::Update(bool overflow) {
  if (!options_.dynamic) return;
  if (overflow) {
    state_.growth_tracker = 0;
    if (--state_.hysteresis_tracker <= 0) state_.scale = std::max(state_.scale * 0.5f, options_.min_scale);
  } else if (++state_.growth_tracker == options_.growth_interval) {
    state_.growth_tracker = 0;
    state_.hysteresis_tracker = options_.hysteresis;
    state_.scale *= 2.0f;
  }
}

}  // namespace mbridge
