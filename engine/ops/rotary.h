// Rotary position embedding (megatron/core/models/common/embeddings/rope_utils.py).
#pragma once

#include "engine/core/op.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge {

enum class RotaryDirection : uint8_t {
  kForward,
  kBackward,  // The transpose: turns a gradient back.
};

// Which elements of the first r of a head are turned against each other.
enum class RotaryPairs : uint8_t {
  kHalves,       // (j, j + r / 2).
  kInterleaved,  // (2 j, 2 j + 1).
};

// Rotates every query and key head of qkv [s, b, layout.width()] in place, values stay. cosine, sine [s, r / 2] F32, values of
// `precision`: the first r elements of a head are turned in pairs (lo, hi), pair j by column j; the others stay.
//   forward:  lo = round(round(lo c) + round(-hi s)),  hi = round(round(hi c) + round(lo s));  backward: with -s.
extern Op<void(const Context&, const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const QkvLayout& layout,
               RotaryPairs pairs, RotaryDirection direction, DType precision)>
    Rotary;

}  // namespace mbridge
