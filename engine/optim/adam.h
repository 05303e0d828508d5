// The AdamW update of one run of elements, in the arithmetic of torch's foreach kernels (torch/optim/adam.py): scalar factors in
// double, then rounded to float; each array operation rounds to float, nothing is contracted.
#pragma once

#include <cstdint>

namespace mbridge {

struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool decoupled_weight_decay = true;  // False: Adam with the decay added to the gradient.
};

// Factors of one step, the same for every element of a group.
struct AdamFactors {
  float decay_multiplier;  // 1 - lr * weight_decay, 1 where the decay is not decoupled.
  float gradient_decay;    // weight_decay where it is not decoupled, else 0.
  float first_weight;      // 1 - beta1
  float second_keep;       // beta2
  float second_weight;     // 1 - beta2
  float root_correction;   // sqrt(1 - beta2^t)
  float eps;
  float negative_step;   // -lr / (1 - beta1^t)
  float gradient_scale;  // 1 / loss scale.
  float clip;            // Clipping coefficient, 1 for none.
};

// `step` is t = 1, 2, …
AdamFactors MakeAdamFactors(const AdamOptions& options, int64_t step, double lr, double weight_decay, float gradient_scale,
                            float clip);

// Updates `count` elements: moments and master in place; `value` gets the master rounded to the model's type (float: null, the
// master is the value). Gradients are read only. Single-threaded; T is float, BFloat16 or Float16.
template <class T>
void AdamUpdate(const AdamFactors& factors, int64_t count, const float* gradient, float* first, float* second, float* master,
                T* value);

}  // namespace mbridge
