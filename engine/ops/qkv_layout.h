// Where the heads stand in the output of Megatron-Core's fused query-key-value layer.
#pragma once

#include <cstdint>

namespace mbridge {

// A token's row: for each group the queries of its heads, then its key, then its value; queries and keys `head_size` wide.
struct QkvLayout {
  int64_t heads = 0;
  int64_t groups = 0;  // Key and value heads; heads is a multiple.
  int64_t head_size = 0;
  int64_t value_size = 0;  // Of a value; 0: head_size.

  int64_t value_width() const { return value_size > 0 ? value_size : head_size; }
  int64_t group_width() const { return (heads_per_group() + 1) * head_size + value_width(); }
  int64_t width() const { return groups * group_width(); }
  int64_t heads_per_group() const { return heads / groups; }
  int64_t query_column(int64_t head) const {
    return head / heads_per_group() * group_width() + head % heads_per_group() * head_size;
  }
  int64_t key_column(int64_t group) const { return group * group_width() + heads_per_group() * head_size; }
  int64_t value_column(int64_t group) const { return key_column(group) + head_size; }
};

}  // namespace mbridge
