// Tokens sorted by expert, and back: every expert's rows lie together, so that its products are plain ones
// (megatron/core/transformer/moe/moe_utils.py, permute and unpermute).
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// A choice of k experts for T tokens makes R = T k rows. Slot t k + j is the j-th choice of token t.
struct ExpertRows {
  Tensor offsets;  // I32 [E + 1]: rows [offsets[e], offsets[e + 1]) are expert e's.
  Tensor slots;    // I32 [R]: the slot that a row is for; within an expert in ascending order.
  Tensor places;   // I32 [R]: the row of a slot (the inverse).
};

// Fills `rows` from experts [T, k] I32 (values 0 .. E - 1).
extern Op<void(const Context&, const Tensor& experts, const ExpertRows& rows)> SortByExpert;

// load [E] F32 += rows of each expert.
extern Op<void(const Context&, const ExpertRows& rows, const Tensor& load)> AddExpertLoad;

// y [R, n]: row r is x's row slots[r] / k. x [T, n].
extern Op<void(const Context&, const Tensor& x, const ExpertRows& rows, const Tensor& y)> GatherRows;

// y [T, n]: y[t] = round(sum over j of x[places[t k + j]], in F32), with `added` (or empty) y = round(that + added). x [R, n].
extern Op<void(const Context&, const Tensor& x, const ExpertRows& rows, const Tensor& added, DType precision, const Tensor& y)>
    SumRows;

}  // namespace mbridge
