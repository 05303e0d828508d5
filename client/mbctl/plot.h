// A line plot in the terminal: two by four dots a character with Braille patterns, or stars without Unicode.
#pragma once

#include <string>
#include <vector>

namespace mbridge::mbctl {

struct PlotPoint {
  double x = 0;
  double y = 0;  // NaN leaves a gap and a mark on the axis.
};

struct PlotOptions {
  std::string title;
  int width = 80;   // Columns of the whole drawing, axis labels included.
  int height = 16;  // Rows of the plot area.
  bool unicode = true;
};

// Several lines, each with its line feed. Says "no points" for an empty or all-NaN series.
std::string DrawPlot(const std::vector<PlotPoint>& points, const PlotOptions& options);

}  // namespace mbridge::mbctl
