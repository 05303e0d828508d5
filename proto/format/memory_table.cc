#include "proto/format/memory_table.h"

#include <fmt/format.h>

#include <array>

namespace mbridge {
namespace {

struct Part {
  const char* name;
  int64_t bytes;
};

std::array<Part, 6> PartsOf(const v1::MemoryEstimate& m) {
  return {{{"weights", m.weight_bytes()},
           {"main gradients", m.gradient_bytes()},
           {"optimizer", m.optimizer_bytes()},
           {"activations", m.activation_bytes()},
           {"workspaces", m.workspace_bytes()},
           {"CUDA and libraries", m.runtime_bytes()}}};
}

int64_t MiB(int64_t bytes) { return (bytes + (1 << 19)) >> 20; }

}  // namespace

int64_t TotalBytes(const v1::MemoryEstimate& memory) {
  int64_t total = 0;
  for (const Part& part : PartsOf(memory)) total += part.bytes;
  return total;
}

std::string MemoryLine(const v1::MemoryEstimate& memory) {
  std::string text;
  for (const Part& part : PartsOf(memory)) {
    if (part.bytes > 0) text += fmt::format("{}{} {} MiB", text.empty() ? "" : ", ", part.name, MiB(part.bytes));
  }
  return fmt::format("{}; together {} MiB", text, MiB(TotalBytes(memory)));
}

std::string MemoryTable(const std::string& title, const v1::MemoryEstimate& memory) {
  std::string text = title;
  for (const Part& part : PartsOf(memory)) {
    if (part.bytes > 0) text += fmt::format("\n  {:<20}{:>9} MiB", part.name, MiB(part.bytes));
  }
  return text + fmt::format("\n  {:<20}{:>9} MiB", "together", MiB(TotalBytes(memory)));
}

}  // namespace mbridge
