// Scratch of the materialised attention on CUDA: products over many heads at once write their scores here.
#pragma once

#include <algorithm>

#include "engine/ops/attention.h"

namespace mbridge::cuda {

// Sizes in elements of the storage type. A head stands at index n = batch * groups + group, j = head inside of the group;
// products take `chunk` values of n at once for one j.
struct AttentionWorkspace {
  static constexpr int64_t kChunkBytes = int64_t{256} << 20;  // Of one score buffer, unless a single head needs more.
  static constexpr int64_t kMaxChunk = 32768;                 // Grid dimension and batch count.

  int64_t element_size;
  int64_t stride;      // From one row of scores to the next: whole 16 bytes.
  int64_t chunk;       // Heads at once.
  int64_t scores;      // Of a score buffer; there are two: scores then dS, and the dropped probabilities.
  int64_t uncapped;    // F32 scores before the soft cap; 0 without one.
  int64_t head_grads;  // Of dK or dV of every head, [n, j, s, size]; 0 where a group has one head: these go straight to d_qkv.

  AttentionWorkspace(const AttentionOptions& o, DType storage) {
    element_size = static_cast<int64_t>(SizeOf(storage));
    stride = (o.seq_length + 7) / 8 * 8;
    const int64_t plane = o.seq_length * stride;
    chunk = std::clamp<int64_t>(kChunkBytes / std::max<int64_t>(1, plane * element_size), 1,
                                std::clamp<int64_t>(o.batch * o.groups, 1, kMaxChunk));
    scores = (chunk * plane + 127) / 128 * 128;
    uncapped = o.soft_cap > 0.0f ? scores : 0;
    head_grads =
        o.heads == o.groups ? 0 : (o.batch * o.heads * o.seq_length * std::max(o.head_size, o.value_width()) + 127) / 128 * 128;
  }
  int64_t bytes() const { return (2 * scores + 2 * head_grads) * element_size + uncapped * static_cast<int64_t>(sizeof(float)); }
};

}  // namespace mbridge::cuda
