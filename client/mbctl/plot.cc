#include "client/mbctl/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace mbridge::mbctl {
namespace {

constexpr int kLabelWidth = 10;
// Bits of U+2800 by row (0..3) and column (0..1) of the dot.
constexpr uint8_t kDots[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};

class Canvas {
 public:
  Canvas(int columns, int rows, bool unicode)
      : unicode_(unicode),
        dots_x_(unicode ? 2 : 1),
        dots_y_(unicode ? 4 : 1),
        columns_(columns),
        rows_(rows),
        cells_(static_cast<size_t>(columns) * static_cast<size_t>(rows), 0) {}

  int width() const { return columns_ * dots_x_; }
  int height() const { return rows_ * dots_y_; }

  void Set(int x, int y) {
    if (x < 0 || y < 0 || x >= width() || y >= height()) return;
    cells_[CellAt(x / dots_x_, y / dots_y_)] |= unicode_ ? kDots[y % 4][x % 2] : 1;
  }
  void Line(int x0, int y0, int x1, int y1) {
    const int steps = std::max({std::abs(x1 - x0), std::abs(y1 - y0), 1});
    for (int i = 0; i <= steps; ++i) {
      Set(x0 + (x1 - x0) * i / steps, y0 + static_cast<int>(std::lround(double(y1 - y0) * i / steps)));
    }
  }
  std::string Row(int row) const {
    std::string text;
    for (int column = 0; column < columns_; ++column) {
      const uint8_t cell = cells_[CellAt(column, row)];
      if (!unicode_) {
        text += cell ? '*' : ' ';
      } else if (cell == 0) {
        text += ' ';
      } else {  // U+2800 + cell in UTF-8.
        text += '\xE2';
        text += static_cast<char>(0xA0 | (cell >> 6));
        text += static_cast<char>(0x80 | (cell & 0x3F));
      }
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  }

 private:
  size_t CellAt(int column, int row) const {
    return static_cast<size_t>(row) * static_cast<size_t>(columns_) + static_cast<size_t>(column);
  }

  bool unicode_;
  int dots_x_, dots_y_, columns_, rows_;
  std::vector<uint8_t> cells_;
};

struct Range {
  double low = 0, high = 0;
};

Range Widen(Range range) {
  if (range.high > range.low) return range;
  const double margin = std::max(std::abs(range.low) * 0.05, 1e-6);
  return {range.low - margin, range.high + margin};
}

}  // namespace

std::string DrawPlot(const std::vector<PlotPoint>& points, const PlotOptions& options) {
  std::string text = options.title.empty() ? "" : options.title + "\n";
  std::vector<PlotPoint> finite;
  size_t missing = 0;
  for (const PlotPoint& point : points) {
    if (std::isfinite(point.y))
      finite.push_back(point);
    else
      ++missing;
  }
  if (finite.empty()) return text + (missing > 0 ? "no points but NaN or Inf\n" : "no points\n");

  const auto by_y = [](const PlotPoint& a, const PlotPoint& b) { return a.y < b.y; };
  const auto by_x = [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; };
  const auto [y_low, y_high] = std::minmax_element(finite.begin(), finite.end(), by_y);
  const auto [x_low, x_high] = std::minmax_element(points.begin(), points.end(), by_x);
  const Range y = Widen({y_low->y, y_high->y});
  const Range x = Widen({x_low->x, x_high->x});

  Canvas canvas(std::max(10, options.width - kLabelWidth - 2), std::max(3, options.height), options.unicode);
  const auto column = [&](double value) {
    return static_cast<int>(std::lround((value - x.low) / (x.high - x.low) * (canvas.width() - 1)));
  };
  const auto row = [&](double value) {
    return static_cast<int>(std::lround((y.high - value) / (y.high - y.low) * (canvas.height() - 1)));
  };
  for (size_t i = 0; i < points.size(); ++i) {
    if (!std::isfinite(points[i].y)) continue;
    canvas.Set(column(points[i].x), row(points[i].y));
    if (i > 0 && std::isfinite(points[i - 1].y)) {
      canvas.Line(column(points[i - 1].x), row(points[i - 1].y), column(points[i].x), row(points[i].y));
    }
  }

  const int rows = std::max(3, options.height);
  const char* axis = options.unicode ? "┤" : "|";
  for (int i = 0; i < rows; ++i) {
    std::string label;
    if (i == 0) label = fmt::format("{:.5g}", y.high);
    if (i == rows / 2) label = fmt::format("{:.5g}", y.high - (y.high - y.low) * i / (rows - 1));
    if (i == rows - 1) label = fmt::format("{:.5g}", y.low);
    text += fmt::format("{:>{}} {}{}\n", label, kLabelWidth, axis, canvas.Row(i));
  }
  const std::string left = fmt::format("{:.6g}", x_low->x);
  const std::string right = fmt::format("{:.6g}", x_high->x);
  const int gap = std::max(1, options.width - kLabelWidth - 2 - static_cast<int>(left.size() + right.size()));
  text += fmt::format("{}{}{}{}\n", std::string(kLabelWidth + 2, ' '), left, std::string(static_cast<size_t>(gap), ' '), right);
  if (missing > 0) text += fmt::format("{} points are NaN or Inf and not drawn\n", missing);
  return text;
}

}  // namespace mbridge::mbctl
