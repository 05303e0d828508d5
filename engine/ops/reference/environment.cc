#include "engine/ops/reference/environment.h"

#include <cstdio>

#include "engine/core/device.h"
#include "engine/ops/bias_add.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/embedding.h"
#include "engine/ops/embedding_places.h"
#include "engine/ops/geglu.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/grouped_gemm.h"
#include "engine/ops/layer_norm.h"
#include "engine/ops/loss_sum.h"
#include "engine/ops/normal_init.h"
#include "engine/ops/rotary.h"
#include "engine/ops/scale.h"
#include "engine/ops/softmax_cross_entropy.h"
#include "engine/ops/squared_relu.h"
#include "engine/ops/swiglu.h"

namespace mbridge::test {

std::vector<std::byte> FitWorkspace(const AttentionOptions& options, DType storage, DeviceType device, Tensor& workspace) {
  if (device == DeviceType::kCpu) return {};
  if (static_cast<int64_t>(workspace.bytes()) < AttentionWorkspaceBytes(options, storage, 1)) return {};
  const int64_t bytes = AttentionWorkspaceBytes(options, storage, 1, device);
  std::vector<std::byte> memory(static_cast<size_t>(bytes));
  workspace = {memory.data(), DType::kU8, DeviceType::kCpu, {bytes}};
  return memory;
}

template <auto& kOp> void ReferenceEnvironment::Install(const char* name) {
  const auto function = device_ == DeviceType::kCpu ? kOp.cpu : kOp.cuda;
  ASSERT_NE(function, nullptr) << name << " has no twin";
  OnDevice<kOp>::Install(function, context_, &uses_.emplace_back(OperatorUse{.name = name}));
}

// Those of registration_test.cc but flash attention's, which have no CPU twin.
void ReferenceEnvironment::InstallAll() {
#define MB_INSTALL(op) Install<op>(#op)
  MB_INSTALL(AddColumnSums);
  MB_INSTALL(AddExpertLoad);
  MB_INSTALL(AddGradient);
  MB_INSTALL(AddLossSums);
  MB_INSTALL(AddRmsNormForward);
  MB_INSTALL(AttentionBackward);
  MB_INSTALL(AttentionForward);
  MB_INSTALL(BiasAdd);
  MB_INSTALL(BiasDropoutAddBackward);
  MB_INSTALL(BiasDropoutAddForward);
  MB_INSTALL(BiasGeluBackward);
  MB_INSTALL(BiasGeluForward);
  MB_INSTALL(BlockQuantize);
  MB_INSTALL(Convert);
  MB_INSTALL(CopyColumns);
  MB_INSTALL(CrossEntropyBegin);
  MB_INSTALL(CrossEntropyFold);
  MB_INSTALL(CrossEntropyGradient);
  MB_INSTALL(CrossEntropyLoss);
  MB_INSTALL(CrossEntropyRescale);
  MB_INSTALL(DrawCompiledDropoutMask);
  MB_INSTALL(DrawCompiledDropoutMaskAt);
  MB_INSTALL(DrawEagerDropoutMask);
  MB_INSTALL(DrawNormal);
  MB_INSTALL(Dropout);
  MB_INSTALL(EmbeddingBackward);
  MB_INSTALL(EmbeddingForward);
  MB_INSTALL(ExpertActivationBackward);
  MB_INSTALL(ExpertActivationForward);
  MB_INSTALL(ExpertBiasAdd);
  MB_INSTALL(ExpertBiasBackward);
  MB_INSTALL(Fp8Amax);
  MB_INSTALL(Fp8BlockProducts);
  MB_INSTALL(Fp8BlockQuantize);
  MB_INSTALL(Fp8DelayedScales);
  MB_INSTALL(Fp8Gemm);
  MB_INSTALL(Fp8Quantize);
  MB_INSTALL(Fp8QuantizeByAmax);
  MB_INSTALL(GatherRows);
  MB_INSTALL(GegluBackward);
  MB_INSTALL(GegluForward);
  MB_INSTALL(Gemm);
  MB_INSTALL(GroupedGemm);
  MB_INSTALL(GroupedGemmInputGradient);
  MB_INSTALL(GroupedGemmWeightGradient);
  MB_INSTALL(HadamardDownRows);
  MB_INSTALL(LayerNormBackward);
  MB_INSTALL(LayerNormForward);
  MB_INSTALL(LocalPlaces);
  MB_INSTALL(MlaJoinHeads);
  MB_INSTALL(MlaSplitHeads);
  MB_INSTALL(QkNormBackward);
  MB_INSTALL(QkNormDots);
  MB_INSTALL(QkNormForward);
  MB_INSTALL(QkNormSquares);
  MB_INSTALL(RmsNormBackward);
  MB_INSTALL(RmsNormForward);
  MB_INSTALL(Rotary);
  MB_INSTALL(RouterBackward);
  MB_INSTALL(RouterBalanceLoss);
  MB_INSTALL(RouterForward);
  MB_INSTALL(Scale);
  MB_INSTALL(SetTargets);
  MB_INSTALL(SharedGateBackward);
  MB_INSTALL(SharedGateForward);
  MB_INSTALL(SoftmaxCrossEntropy);
  MB_INSTALL(SortByExpert);
  MB_INSTALL(SquaredReluBackward);
  MB_INSTALL(SquaredReluForward);
  MB_INSTALL(StreamPlaces);
  MB_INSTALL(SumRows);
  MB_INSTALL(SwiGluBackward);
  MB_INSTALL(SwiGluBackwardWithAmax);
  MB_INSTALL(SwiGluForward);
  MB_INSTALL(SwiGluForwardWithAmax);
  MB_INSTALL(TransformLogits);
  MB_INSTALL(TransformLogitsBackward);
  MB_INSTALL(UpdateExpertBias);
#undef MB_INSTALL
}

void ReferenceEnvironment::SetUp() {
  context_ = DeviceOf(device_).MakeContext(size_t{64} << 20);
  InstallAll();
}

void ReferenceEnvironment::TearDown() {
  if (uses_.empty()) return;  // Skipped.
  std::printf("%-28s %9s %9s %9s\n", "operator", "on device", "on CPU", "refused");
  for (const OperatorUse& use : uses_) {
    std::printf("%-28s %9lld %9lld %9lld\n", use.name.c_str(), static_cast<long long>(use.on_device),
                static_cast<long long>(use.on_cpu), static_cast<long long>(use.refused));
  }
  if (GTEST_FLAG_GET(filter) != "*") return;
  for (const OperatorUse& use : uses_) {
    EXPECT_GT(use.on_device, 0) << use.name << " never ran on the device: no test calls it, or all its calls went elsewhere";
  }
}

}  // namespace mbridge::test
