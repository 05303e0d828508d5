// Targets of a microbatch on the device, and the sums of its losses: what the loss and its gradient need of labels and mask.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// From labels I32 and mask F32, both [b, s], to sequence-first order: labels_out I32 [s * b], weight F32 [s * b] = mask *
// (grad_scale / max(sum of mask, 1)).
extern Op<void(const Context&, const Tensor& labels, const Tensor& mask, float grad_scale, const Tensor& labels_out,
               const Tensor& weight)>
    SetTargets;

// totals F64 [2]: totals[0] += the F32-rounded sum of loss * mask, totals[1] += the sum of mask. loss F32 [s, b] (or [s * b]),
// mask F32 [b, s]; F64 sums of F32 products.
extern Op<void(const Context&, const Tensor& loss, const Tensor& mask, const Tensor& totals)> AddLossSums;

}  // namespace mbridge
