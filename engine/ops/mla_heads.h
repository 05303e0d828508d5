// Heads of multi-latent attention: queries, keys and values put together from what the projections give, and their gradients
// taken apart again (megatron/core/transformer/multi_latent_attention.py).
#pragma once

#include "engine/ops/qkv_layout.h"
#include "engine/ops/rotary.h"

namespace mbridge {

struct MlaLayout {
  int64_t heads = 0;
  int64_t plain_size = 0;   // Part of a query or key that positions don't turn.
  int64_t turned_size = 0;  // Part that they turn, behind the other; keys share it.
  int64_t value_size = 0;

  int64_t query_width() const { return heads * (plain_size + turned_size); }
  int64_t key_value_width() const { return heads * (plain_size + value_size); }
  QkvLayout qkv() const { return {heads, heads, plain_size + turned_size, value_size}; }
};

// qkv [s, b, layout.qkv().width()] from
//   query [s, b, query_width]: per head its plain and its turned part;
//   key_value [s, b, key_value_width]: per head the plain part of the key, then the value;
//   down [s, b, ...]: its last turned_size columns are the turned part of every key.
// Turned parts are rotated as Rotary does it, by cosine, sine F32 [s, turned_size / 2]. Inputs are rounded on read.
extern Op<void(const Context&, const Tensor& query, const Tensor& key_value, const Tensor& down, const Tensor& cosine,
               const Tensor& sine, const MlaLayout& layout, RotaryPairs pairs, DType precision, const Tensor& qkv)>
    MlaJoinHeads;

// The gradients of the three from d_qkv. That of the keys' turned part is the heads' sum in F32, rounded, turned back; it goes to
// the last columns of d_down, whose others are left alone.
extern Op<void(const Context&, const Tensor& d_qkv, const Tensor& cosine, const Tensor& sine, const MlaLayout& layout,
               RotaryPairs pairs, DType precision, const Tensor& d_query, const Tensor& d_key_value, const Tensor& d_down)>
    MlaSplitHeads;

// to[:, to_begin .. + count) = round(from[:, from_begin .. + count)). Both [rows, ...] of one storage.
extern Op<void(const Context&, const Tensor& from, int64_t from_begin, const Tensor& to, int64_t to_begin, int64_t count,
               DType precision)>
    CopyColumns;

}  // namespace mbridge
