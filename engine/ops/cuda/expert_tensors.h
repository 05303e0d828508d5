// What the kernels over rows of experts share: the experts' tensors by one address and one distance, and whose row is whose.
#pragma once

#include <span>

#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {

inline constexpr int kMaxExperts = 512;

// Elements from one expert's tensor to the next. They must be equally far apart, as parameters of one shape declared one after
// another are.
inline int64_t StrideOf(std::span<const Tensor> tensors) {
  if (tensors.empty() || tensors.size() > kMaxExperts) ThrowEngineError("{} experts: 1 to {}", tensors.size(), kMaxExperts);
  if (tensors.size() == 1) return tensors[0].size();
  const auto bytes_between = [&](size_t i) {
    return static_cast<const char*>(tensors[i + 1].data) - static_cast<const char*>(tensors[i].data);
  };
  for (size_t i = 1; i + 1 < tensors.size(); ++i) {
    if (bytes_between(i) != bytes_between(0)) ThrowEngineError("tensors of {} experts are not equally far apart", tensors.size());
  }
  return bytes_between(0) / static_cast<int64_t>(SizeOf(tensors[0].dtype));
}

// Rows [begin, end) of an expert, at most `height` of them; expert -1: there is no such tile.
struct RowTile {
  int expert, begin, end;
};

// The index-th tile if each expert's rows are cut into tiles of `height`. Every warp of a one-dimensional block finds it alone.
__device__ inline RowTile FindRowTile(const int32_t* offsets, int experts, int index, int height) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < experts; base += 32) {
    const int e = base + lane, begin = e < experts ? offsets[e] : 0, end = e < experts ? offsets[e + 1] : 0;
    const int tiles = (end - begin + height - 1) / height;
    int sum = tiles;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int lower = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += lower;
    }
    const int first = before + sum - tiles;
    const unsigned found = __ballot_sync(0xffffffffu, index >= first && index < first + tiles);
    if (found != 0) {
      const int owner = __ffs(found) - 1, row = begin + (index - first) * height;
      const int tile_begin = __shfl_sync(0xffffffffu, row, owner), last = __shfl_sync(0xffffffffu, end, owner);
      return {base + owner, tile_begin, min(tile_begin + height, last)};
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return {-1, 0, 0};
}

// The expert of a row.
__device__ inline int ExpertOf(const int32_t* offsets, int experts, int row) {
  int low = 0, high = experts;  // offsets[low] <= row < offsets[high].
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= row ? low : high) = middle;
  }
  return low;
}

}  // namespace mbridge::cuda
