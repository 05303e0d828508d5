// Keep masks (1 kept, 0 dropped) of PyTorch's dropout, bit for bit, made where they are used. torch_random.h has the arithmetic
// and the stream's advance (CudaDrawAdvance), which is the caller's to make.
#pragma once

#include "engine/core/op.h"
#include "engine/core/torch_random.h"

namespace mbridge {

// Where a mask is drawn: a stream's position, or on CUDA one that the kernel reads when it runs, so that a CUDA graph draws new
// masks each time it is replayed.
struct MaskPosition {
  MaskPosition(PhiloxStream position) : stream(position) {}  // NOLINT: a position is one.
  // `ahead` numbers (a multiple of 4) after the position whose seed and offset stand at `words` in device memory.
  MaskPosition(const uint64_t* words, uint64_t ahead) : stream{0, ahead}, device_words(words) {}
  PhiloxStream stream;
  const uint64_t* device_words = nullptr;
};

// Of torch.nn.Dropout(p) on a CUDA tensor with elements of `element_bytes` (2 or 4), drawn at the stream's position. keep U8;
// 0 < p < 1.
extern Op<void(const Context&, MaskPosition position, int sm_count, double p, int element_bytes, const Tensor& keep)>
    DrawEagerDropoutMask;

// Of dropout(p) inside a compiled function that drew `seed` (DrawCompiledSeed), for linear indices 0 .. size - 1.
extern Op<void(const Context&, int64_t seed, double p, const Tensor& keep)> DrawCompiledDropoutMask;
// The same, with the seed that DrawCompiledSeed draws at `position`.
extern Op<void(const Context&, MaskPosition position, double p, const Tensor& keep)> DrawCompiledDropoutMaskAt;

}  // namespace mbridge
