#include "engine/ops/reference/on_device.h"

#include <gtest/gtest-spi.h>

#include "engine/ops/test_support.h"

namespace mbridge::test {
namespace {

constexpr float kWritten = 7.0f;

// What the function that stands for the device saw.
struct Seen {
  Tensor x, row, y, empty, amax;
  std::vector<Tensor> span;
} g_seen;

using Probe = Op<void(const Context&, const Tensor& x, const Tensor& row, std::span<const Tensor> span, const Tensor& empty,
                      const NormOptions& options, const Tensor& y)>;
void Look(const Context&, const Tensor& x, const Tensor& row, std::span<const Tensor> span, const Tensor& empty,
          const NormOptions& options, const Tensor& y) {
  g_seen = {x, row, y, empty, options.amax, {span.begin(), span.end()}};
  y.as<float>()[0] = kWritten;
  options.amax.as<float>()[0] = x.as<float>()[5];
}
void NeverOnCpu(const Context&, const Tensor&, const Tensor&, std::span<const Tensor>, const Tensor&, const NormOptions&,
                const Tensor&) {
  FAIL();
}
Probe g_probe(&NeverOnCpu);

TEST(OnDeviceTest, OperandsMoveAndComeBack) {
  OperatorUse use;
  OnDevice<g_probe>::Install(&Look, {}, &use);
  const Owned x(DType::kF32, {3, 2}, {1, 2, 3, 4, 5, 6}), amax(DType::kF32, {1});
  std::vector<Owned> members;
  std::vector<Tensor> span;
  for (int i = 0; i < 4; ++i) {
    members.emplace_back(DType::kF32, Shape{3}, Values(3, i));
    const Owned between(DType::kF32, {7 + 50 * i});
    span.push_back(members.back());
  }
  std::swap(span[1], span[3]);  // Not in the order of their addresses.
  g_probe({}, x, x.tensor().Rows(2, 1), span, {}, {.amax = amax}, x);
  EXPECT_EQ(use.on_device, 1);
  // Aliases and windows stay what they are, at another place.
  EXPECT_NE(g_seen.x.data, x.tensor().data);
  EXPECT_EQ(g_seen.y.data, g_seen.x.data);
  EXPECT_EQ(g_seen.row.as<float>(), g_seen.x.as<float>() + 4);
  EXPECT_EQ(g_seen.row.shape, (Shape{1, 2}));
  EXPECT_TRUE(g_seen.empty.empty());
  EXPECT_NE(g_seen.amax.data, amax.tensor().data);
  for (int i = 1; i < 4; ++i) {
    EXPECT_EQ(g_seen.span[i].as<float>() - g_seen.span[i - 1].as<float>(),
              g_seen.span[1].as<float>() - g_seen.span[0].as<float>());
  }
  // The window came before the alias: both brought back what was written.
  EXPECT_EQ(x.ToValues(), (Values{kWritten, 2, 3, 4, 5, 6}));
  EXPECT_EQ(amax[0], 6);
}

using Unary = Op<void(const Context&, const Tensor& x, DType precision, const Tensor& y)>;
using Unary2 = Op<void(const Context&, const Tensor& x)>;
void WriteBehind(const Context&, const Tensor& x) { x.as<float>()[x.size() + 3] = 0.0f; }
void NotCalled(const Context&, const Tensor&) { FAIL(); }
Unary2 g_behind(&NotCalled), g_shifted(&NotCalled);

TEST(OnDeviceTest, WritesBesideTheOperandsAreSeen) {
  OperatorUse use;
  OnDevice<g_behind>::Install(&WriteBehind, {}, &use);
  static const Owned x(DType::kF32, {4}, {1, 2, 3, 4});
  EXPECT_NONFATAL_FAILURE(g_behind({}, x), "wrote outside of its operands, 12 bytes behind");
  EXPECT_EQ(x.ToValues(), (Values{1, 2, 3, 4}));
}

uintptr_t g_address = 0;
void NoteAddress(const Context&, const Tensor& x) { g_address = reinterpret_cast<uintptr_t>(x.data); }

TEST(OnDeviceTest, AddressesKeepTheirRemainder) {
  OperatorUse use;
  OnDevice<g_shifted>::Install(&NoteAddress, {}, &use);
  const Owned x(DType::kF32, {8});
  for (int64_t i = 0; i < 8; ++i) {
    g_shifted({}, x.tensor().Rows(i, 1));
    EXPECT_EQ(g_address % 16, reinterpret_cast<uintptr_t>(x.tensor().Rows(i, 1).data) % 16);
  }
}

// As the CUDA twins: storage is the precision.
void Copy(const Context&, const Tensor& x, DType, const Tensor& y) { std::memcpy(y.data, x.data, y.bytes()); }
void CopyOfOwnStorage(const Context& context, const Tensor& x, DType precision, const Tensor& y) {
  if (x.dtype != precision) ThrowEngineError("another storage");
  Copy(context, x, precision, y);
}
Unary g_copy(&Copy);

TEST(OnDeviceTest, OnlyEmulatedTypesGoToTheCpu) {
  OperatorUse use;
  OnDevice<g_copy>::Install(&CopyOfOwnStorage, {}, &use);
  const Owned x(DType::kF32, {2}, {1, 2}), y(DType::kF32, {2}), narrow(DType::kBF16, {2}, {3, 4}), z(DType::kBF16, {2});
  g_copy({}, x, DType::kF32, y);
  g_copy({}, narrow, DType::kBF16, z);
  EXPECT_EQ(z.ToValues(), (Values{3, 4}));
  EXPECT_EQ(use.on_device, 2);
  g_copy({}, x, DType::kF16, y);
  g_copy({}, x, DType::kBF16, z);  // As attention with its saved probabilities.
  EXPECT_EQ(use.on_cpu, 2);
  EXPECT_THROW(g_copy({}, narrow, DType::kF32, z), EngineError);
  EXPECT_EQ(use.refused, 1);
  EXPECT_EQ(use.on_device, 2);
  EXPECT_THROW(g_copy({.device = DeviceType::kCuda}, x, DType::kF32, y), EngineError);
}

Unary g_inner(&Copy);
void CallInner(const Context& context, const Tensor& x, DType precision, const Tensor& y) { g_inner(context, x, precision, y); }
Unary g_outer(&CallInner);

TEST(OnDeviceTest, OperatorsCallEachOtherDirectly) {
  OperatorUse inner, outer;
  OnDevice<g_inner>::Install(&Copy, {}, &inner);
  OnDevice<g_outer>::Install(&CallInner, {}, &outer);
  const Owned x(DType::kF32, {2}, {1, 2}), y(DType::kF32, {2});
  g_outer({}, x, DType::kF32, y);
  EXPECT_EQ(y.ToValues(), x.ToValues());
  EXPECT_EQ(outer.on_device, 1);
  EXPECT_EQ(inner.on_device + inner.on_cpu, 0);
}

TEST(OnDeviceTest, AttentionGetsTheDevicesWorkspace) {
  const AttentionOptions options{.seq_length = 64, .batch = 4, .heads = 4, .groups = 2, .head_size = 8};
  const Owned enough(DType::kU8, {AttentionWorkspaceBytes(options, DType::kF32, 1)}), small(DType::kU8, {8});
  Tensor workspace = enough;
  const std::vector<std::byte> memory = FitWorkspace(options, DType::kF32, DeviceType::kCuda, workspace);
  EXPECT_EQ(workspace.data, memory.data());
  EXPECT_EQ(workspace.size(), AttentionWorkspaceBytes(options, DType::kF32, 1, DeviceType::kCuda));
  workspace = small;
  FitWorkspace(options, DType::kF32, DeviceType::kCuda, workspace);
  EXPECT_EQ(workspace.data, small.tensor().data);
  workspace = enough;
  FitWorkspace(options, DType::kF32, DeviceType::kCpu, workspace);
  EXPECT_EQ(workspace.data, enough.tensor().data);
}

}  // namespace
}  // namespace mbridge::test
