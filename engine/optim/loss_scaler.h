// Loss scale for FP16 training, as Megatron-LM's grad_scaler.py: the scale is a float and changes by factors of two.
// Not thread-safe.
#pragma once

#include <cstdint>

namespace mbridge {

struct LossScalerOptions {
  bool dynamic = false;            // FP16 without optimizer.loss_scale. Otherwise the scale stays at initial_scale.
  float initial_scale = 1;         // optimizer.initial_loss_scale (2^32) or optimizer.loss_scale; 1 for BF16 and FP32.
  float min_scale = 1;             // optimizer.min_loss_scale
  int64_t growth_interval = 1000;  // optimizer.loss_scale_window: good steps until the scale doubles.
  int hysteresis = 2;              // optimizer.hysteresis: overflows until the scale halves.
};

class LossScaler {
 public:
  struct State {
    float scale = 1;
    int64_t growth_tracker = 0;
    int hysteresis_tracker = 0;
  };

  explicit LossScaler(const LossScalerOptions& options);

  // The loss is multiplied by it before backward.
  float scale() const { return state_.scale; }
  // Gradients are multiplied by it before clipping.
  float inverse_scale() const { return static_cast<float>(1.0 / static_cast<double>(state_.scale)); }
  // After a step: `overflow` when a gradient of any rank was infinite or NaN. The overflow count is not reset by a good step,
  // only by growth (so does Megatron-LM).
  void Update(bool overflow);

  const State& state() const { return state_; }
  void Restore(const State& state) { state_ = state; }

 private:
  LossScalerOptions options_;
  State state_;
};

}  // namespace mbridge
