// Where a rank of a tensor-parallel group finds its words and positions.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// out[i] = tokens[i] - first, or -1 where that is not in [0, count): another rank's word. I32, any shape.
extern Op<void(const Context&, const Tensor& tokens, int64_t first, int64_t count, const Tensor& out)> LocalPlaces;

// For a stream that holds rows [first_row, first_row + n) of the sequence, both outputs I32 [b, n]: rows[i, j] = j b + i, the
// token's place in the stream, positions[i, j] = position_ids[i, first_row + j]. position_ids I32 [b, s].
extern Op<void(const Context&, const Tensor& position_ids, int64_t first_row, const Tensor& rows, const Tensor& positions)>
    StreamPlaces;

}  // namespace mbridge
