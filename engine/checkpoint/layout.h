// Where the elements of a part of a tensor lie in the whole tensor; all offsets are in elements, row-major. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/tensor.h"

namespace mbridge {

// The part that a CheckpointTensor describes.
struct Part {
  Shape global_shape;
  Shape shard_shape;
  int shard_axis = -1;
  int64_t shard_begin = 0;
  int64_t flat_begin = 0;
  int64_t count = 0;
  bool operator==(const Part&) const = default;
};

// Empty, or why the part does not lie in the tensor.
std::string CheckPart(const Part& part);

// A stretch that is contiguous in the part and in the whole tensor.
struct Run {
  int64_t global;
  int64_t local;
  int64_t length;
};

// All runs of a part in ascending order, both in global and in local offsets.
std::vector<Run> RunsOf(const Part& part);

// Copies what both parts hold; `width` is the element size in bytes. Returns the number of elements copied.
int64_t CopyOverlap(const Part& source, const void* source_data, const Part& target, void* target_data, size_t width);
bool Overlaps(const Part& a, const Part& b);

// Empty if the parts together hold every element of their tensor exactly once, else what is wrong.
std::string CheckCoverage(const std::vector<Part>& parts);

}  // namespace mbridge
