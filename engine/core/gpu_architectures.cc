#include "engine/core/gpu_architectures.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include <fmt/format.h>

namespace mbridge {
namespace {

// Kernels that begin before the one before them has ended (griddepcontrol) are in the code of no older GPU.
constexpr int kOldest = 90;

struct Architecture {
  int capability = 0;
  bool own_only = false;     // 90a
  bool family_only = false;  // 100f
  bool ptx = true;
};

// A word of CMAKE_CUDA_ARCHITECTURES; capability 0 for any that is not a number with its suffixes.
Architecture Parse(std::string_view word) {
  Architecture a;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), a.capability);
  std::string_view suffix = word.substr(static_cast<size_t>(end - word.data()));
  if (error != std::errc() || a.capability < 10) return {};
  if (suffix.starts_with('a') || suffix.starts_with('f')) {
    (suffix.front() == 'a' ? a.own_only : a.family_only) = true;
    suffix.remove_prefix(1);
  }
  a.ptx = suffix != "-real";
  return suffix.empty() || suffix == "-real" || suffix == "-virtual" ? a : Architecture{};
}

std::vector<Architecture> ParseAll(std::string_view built) {
  std::vector<Architecture> all;
  while (!built.empty()) {
    const size_t comma = std::min(built.find(','), built.size());
    if (const Architecture a = Parse(built.substr(0, comma)); a.capability != 0) all.push_back(a);
    built.remove_prefix(std::min(comma + 1, built.size()));
  }
  return all;
}

bool RunsOn(const Architecture& a, int capability) {
  if (a.own_only) return capability == a.capability;
  const bool same_major = capability / 10 == a.capability / 10;
  return capability >= a.capability && (same_major || (a.ptx && !a.family_only));
}

std::string Dotted(int capability) { return fmt::format("{}.{}", capability / 10, capability % 10); }

}  // namespace

std::string_view BuiltGpuArchitectures() { return MB_GPU_ARCHITECTURES; }

std::string WhyNoKernels(std::string_view gpu_name, int compute_capability, std::string_view built) {
  const std::vector<Architecture> architectures = ParseAll(built);
  if (compute_capability == 0 || architectures.empty()) return "";
  std::string list;
  for (const Architecture& a : architectures) {
    if (RunsOn(a, compute_capability)) return "";
    list += (list.empty() ? "" : ", ") + Dotted(a.capability) + (a.ptx && !a.own_only && !a.family_only ? " and later" : "");
  }
  const std::string next =
      compute_capability < kOldest
          ? fmt::format("no build can use a GPU older than {}: use --device cpu", Dotted(kOldest))
          : fmt::format("rebuild with -DCMAKE_CUDA_ARCHITECTURES={} or use --device cpu", compute_capability);
  return fmt::format("{} has compute capability {}; this build has kernels for {}: {}", gpu_name, Dotted(compute_capability),
                     list, next);
}

}  // namespace mbridge
