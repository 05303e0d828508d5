// An operator's operands on another device.
#pragma once

#include "engine/core/op.h"
#include "engine/ops/reference/operands.h"

namespace mbridge::test {

// Copies all memory of the operands to the context's device and points them there. Operands that overlap or touch, as aliases
// and windows of one tensor do, share one copy. Others stand in the order of the arguments, so that the tensors of a span, which
// have one size, stand equally far apart; addresses keep their remainder of 16. NaN patterns lie around every copy.
class Mirror {
 public:
  Mirror(const Context& context, const std::vector<Operands::Place>& places);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  // Waits for the device and brings everything back. A test failure if anything was written beside the copies.
  void CopyBack();

 private:
  struct Region {
    std::byte* host;
    size_t bytes;
    size_t offset;
    size_t first;  // Index of its first place.
  };
  // Fills regions_ and sorts them by `first`; returns each place's region.
  std::vector<size_t> Join(const std::vector<Operands::Place>& places);

  const Context context_;
  std::vector<Region> regions_;
  std::vector<std::byte> image_;  // What the device was given; the host side of both copies.
  std::byte* memory_ = nullptr;
};

}  // namespace mbridge::test
