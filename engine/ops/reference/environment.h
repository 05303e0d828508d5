// The reference tests of engine/ops (*_test.cc there) on another device.
#pragma once

#include <deque>

#include <gtest/gtest.h>

#include "engine/ops/reference/on_device.h"

namespace mbridge::test {

// Replaces the CPU twin of every operator that has a CUDA twin by what runs on `device`: the CUDA twin, or on the CPU the CPU
// twin itself, which shows that operands survive the way there and back. At the end prints how often each operator ran there; a
// run of all tests fails if one never did.
class ReferenceEnvironment : public testing::Environment {
 public:
  explicit ReferenceEnvironment(DeviceType device) : device_(device) {}
  void SetUp() override;
  void TearDown() override;

 private:
  template <auto& kOp> void Install(const char* name);
  void InstallAll();

  const DeviceType device_;
  Context context_;
  std::deque<OperatorUse> uses_;
};

}  // namespace mbridge::test
