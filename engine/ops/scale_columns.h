// Multiplication of the columns of a tensor by a factor for each of a few neighbouring parts.
#pragma once

#include <array>

#include "engine/core/op.h"

namespace mbridge {

// Part i: `widths[i]` columns; together they are all.
struct ColumnFactors {
  static constexpr int kMost = 5;
  int parts = 0;
  std::array<int64_t, kMost> widths{};
  std::array<float, kMost> factors{};
};

// y = round(round(x) * factor of the column), x, y [rows, n]; y may be x. Also its own backward.
extern Op<void(const Context&, const Tensor& x, const ColumnFactors& factors, DType precision, const Tensor& y)> ScaleColumns;

}  // namespace mbridge
