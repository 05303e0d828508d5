#include "engine/optim/adam.h"

#include <cmath>

#include "engine/core/dtype.h"

namespace mbridge {

AdamFactors MakeAdamFactors(const AdamOptions& options, int64_t step, double lr, double weight_decay, float gradient_scale,
                            float clip) {
  const double t = static_cast<double>(step);
  const double correction1 = 1 - std::pow(options.beta1, t);
  const double correction2 = 1 - std::pow(options.beta2, t);
  const bool decoupled = options.decoupled_weight_decay;
  return {.decay_multiplier = decoupled ? static_cast<float>(1 - lr * weight_decay) : 1.0f,
          .gradient_decay = decoupled ? 0.0f : static_cast<float>(weight_decay),
          .first_weight = static_cast<float>(1 - options.beta1),
          .second_keep = static_cast<float>(options.beta2),
          .second_weight = static_cast<float>(1 - options.beta2),
          .root_correction = static_cast<float>(std::sqrt(correction2)),
          .eps = static_cast<float>(options.eps),
          .negative_step = static_cast<float>(lr / correction1 * -1),
          .gradient_scale = gradient_scale,
          .clip = clip};
}

namespace {

// kMasterIsValue, kDecayGradient and kLerpFromEnd keep the loop free of branches.
template <class T, bool kMasterIsValue, bool kDecayGradient, bool kLerpFromEnd>
void UpdateLoop(const AdamFactors& f, int64_t count, const float* __restrict gradient, float* __restrict first,
                float* __restrict second, float* __restrict master, T* __restrict value) {
  const float first_keep = 1.0f - f.first_weight;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    float p = master[i];
    float g = gradient[i] * f.gradient_scale * f.clip;
    if constexpr (kDecayGradient)
      g = g + f.gradient_decay * p;
    else
      p = p * f.decay_multiplier;
    // torch.lerp counts from the nearer end.
    const float m = kLerpFromEnd ? g - (g - first[i]) * first_keep : first[i] + f.first_weight * (g - first[i]);
    const float v = second[i] * f.second_keep + f.second_weight * (g * g);
    const float denominator = std::sqrt(v) / f.root_correction + f.eps;
    p = p + f.negative_step * (m / denominator);
    first[i] = m;
    second[i] = v;
    master[i] = p;
    if constexpr (!kMasterIsValue) value[i] = FromFloat<T>(p);
  }
}

}  // namespace

template <class T>
void AdamUpdate(const AdamFactors& f, int64_t count, const float* gradient, float* first, float* second, float* master,
                T* value) {
  constexpr bool kSame = sizeof(T) == sizeof(float);
  const bool decay_gradient = f.gradient_decay != 0.0f;
  const bool from_end = std::fabs(f.first_weight) >= 0.5f;
  if (decay_gradient) {
    from_end ? UpdateLoop<T, kSame, true, true>(f, count, gradient, first, second, master, value)
             : UpdateLoop<T, kSame, true, false>(f, count, gradient, first, second, master, value);
  } else {
    from_end ? UpdateLoop<T, kSame, false, true>(f, count, gradient, first, second, master, value)
             : UpdateLoop<T, kSame, false, false>(f, count, gradient, first, second, master, value);
  }
}

template void AdamUpdate<float>(const AdamFactors&, int64_t, const float*, float*, float*, float*, float*);
template void AdamUpdate<BFloat16>(const AdamFactors&, int64_t, const float*, float*, float*, float*, BFloat16*);
template void AdamUpdate<Float16>(const AdamFactors&, int64_t, const float*, float*, float*, float*, Float16*);

}  // namespace mbridge
