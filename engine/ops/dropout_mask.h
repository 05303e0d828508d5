// Keep masks (1 kept, 0 dropped) of PyTorch's dropout, bit for bit, made where they are used. torch_random.h has the arithmetic
// and the stream's advance (CudaDrawAdvance), which is the caller's to make.
#pragma once

#include "engine/core/op.h"
#include "engine/core/torch_random.h"

namespace mbridge {

// Of torch.nn.Dropout(p) on a CUDA tensor with elements of `element_bytes` (2 or 4), drawn at the stream's position. keep U8;
// 0 < p < 1.
extern Op<void(const Context&, PhiloxStream position, int sm_count, double p, int element_bytes, const Tensor& keep)>
    DrawEagerDropoutMask;

// Of dropout(p) inside a compiled function that drew `seed` (DrawCompiledSeed), for linear indices 0 .. size - 1.
extern Op<void(const Context&, int64_t seed, double p, const Tensor& keep)> DrawCompiledDropoutMask;

}  // namespace mbridge
