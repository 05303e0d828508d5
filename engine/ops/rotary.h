// Rotary position embedding, halves rotated against each other (megatron/core/models/common/embeddings/rope_utils.py, not
// interleaved).
#pragma once

#include "engine/core/op.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge {

enum class RotaryDirection : uint8_t {
  kForward,
  kBackward,  // The transpose: turns a gradient back.
};

// Rotates every query and key head of qkv [s, b, layout.width()] in place, values stay. cosine, sine [s, r / 2] F32, values of
// `precision`: the first r elements of a head are turned, pairs (j, j + r / 2), the others stay.
//   forward:  lo = round(round(lo c) + round(-hi s)),  hi = round(round(hi c) + round(lo s));  backward: with -s.
extern Op<void(const Context&, const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const QkvLayout& layout,
               RotaryDirection direction, DType precision)>
    Rotary;

}  // namespace mbridge
