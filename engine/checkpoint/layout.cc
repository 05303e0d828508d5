#include "engine/checkpoint/layout.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace mbridge {

std::string CheckPart(const Part& part) {
  const Shape& whole = part.global_shape;
  const Shape& shard = part.shard_shape;
  for (int axis = 0; axis < whole.rank(); ++axis) {
    if (whole[axis] < 0) return fmt::format("shape {} has a negative dimension", whole.ToString());
  }
  if (shard.rank() != whole.rank() || part.shard_axis < -1 || part.shard_axis >= whole.rank()) {
    return fmt::format("shard {} along axis {} does not fit the shape {}", shard.ToString(), part.shard_axis, whole.ToString());
  }
  for (int axis = 0; axis < whole.rank(); ++axis) {
    if (shard[axis] < 0 || (axis != part.shard_axis && shard[axis] != whole[axis])) {
      return fmt::format("shard {} along axis {} does not fit the shape {}", shard.ToString(), part.shard_axis, whole.ToString());
    }
  }
  if (part.shard_begin < 0 || (part.shard_axis < 0 && part.shard_begin != 0) ||
      (part.shard_axis >= 0 && part.shard_begin > whole[part.shard_axis] - shard[part.shard_axis])) {
    return fmt::format("shard {} beginning at {} does not lie in the shape {}", shard.ToString(), part.shard_begin,
                       whole.ToString());
  }
  if (part.flat_begin < 0 || part.count < 0 || part.flat_begin > shard.NumElements() - part.count) {
    return fmt::format("elements {} to {} do not lie in the shard {}", part.flat_begin, part.flat_begin + part.count,
                       shard.ToString());
  }
  return "";
}

std::vector<Run> RunsOf(const Part& part) {
  if (part.count == 0) return {};
  int64_t inner = 1;
  for (int axis = part.global_shape.rank() - 1; axis > part.shard_axis; --axis) inner *= part.global_shape[axis];
  const bool whole = part.shard_axis < 0 || part.shard_shape == part.global_shape;
  // A row: what is contiguous in the shard and in the whole tensor.
  const int64_t row = whole ? part.shard_shape.NumElements() : part.shard_shape[part.shard_axis] * inner;
  const int64_t global_row = whole ? row : part.global_shape[part.shard_axis] * inner;
  const int64_t origin = whole ? 0 : part.shard_begin * inner;
  const int64_t end = part.flat_begin + part.count;
  std::vector<Run> runs;
  for (int64_t at = part.flat_begin; at < end;) {
    const int64_t index = at / row;
    const int64_t next = std::min(end, (index + 1) * row);
    runs.push_back({index * global_row + origin + (at - index * row), at - part.flat_begin, next - at});
    at = next;
  }
  return runs;
}

namespace {

// Calls visit(a's local offset, b's local offset, length) for every common stretch.
template <class Visit> void ForEachCommonRun(const std::vector<Run>& a, const std::vector<Run>& b, Visit&& visit) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const int64_t begin = std::max(a[i].global, b[j].global);
    const int64_t a_end = a[i].global + a[i].length;
    const int64_t b_end = b[j].global + b[j].length;
    const int64_t end = std::min(a_end, b_end);
    if (begin < end) visit(a[i].local + (begin - a[i].global), b[j].local + (begin - b[j].global), end - begin);
    a_end <= b_end ? ++i : ++j;
  }
}

}  // namespace

int64_t CopyOverlap(const Part& source, const void* source_data, const Part& target, void* target_data, size_t width) {
  int64_t copied = 0;
  ForEachCommonRun(RunsOf(source), RunsOf(target), [&](int64_t from, int64_t to, int64_t length) {
    std::memcpy(static_cast<char*>(target_data) + static_cast<size_t>(to) * width,
                static_cast<const char*>(source_data) + static_cast<size_t>(from) * width, static_cast<size_t>(length) * width);
    copied += length;
  });
  return copied;
}

bool Overlaps(const Part& a, const Part& b) {
  bool found = false;
  ForEachCommonRun(RunsOf(a), RunsOf(b), [&](int64_t, int64_t, int64_t) { found = true; });
  return found;
}

std::string CheckCoverage(const std::vector<Part>& parts) {
  std::vector<Run> runs;
  for (const Part& part : parts) {
    if (part.global_shape != parts[0].global_shape) {
      return fmt::format("its parts belong to the shapes {} and {}", parts[0].global_shape.ToString(),
                         part.global_shape.ToString());
    }
    const std::vector<Run> more = RunsOf(part);
    runs.insert(runs.end(), more.begin(), more.end());
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.global < b.global; });
  int64_t next = 0;
  for (const Run& run : runs) {
    if (run.global < next) return fmt::format("element {} is written twice", run.global);
    if (run.global > next) return fmt::format("no rank writes the elements {} to {}", next, run.global);
    next = run.global + run.length;
  }
  const int64_t total = parts.empty() ? 0 : parts[0].global_shape.NumElements();
  return next == total ? "" : fmt::format("no rank writes the elements {} to {}", next, total);
}

}  // namespace mbridge
