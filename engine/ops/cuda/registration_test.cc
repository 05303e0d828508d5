// Every operator that a model uses has a CUDA twin. Needs no GPU.
#include <gtest/gtest.h>

#include "engine/ops/attention.h"
#include "engine/ops/attention_sinks.h"
#include "engine/ops/bias_add.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/block_quantize.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/embedding.h"
#include "engine/ops/embedding_places.h"
#include "engine/ops/expert_activation.h"
#include "engine/ops/flash_attention.h"
#include "engine/ops/fp8_gemm.h"
#include "engine/ops/geglu.h"
#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/grouped_gemm.h"
#include "engine/ops/layer_norm.h"
#include "engine/ops/logit_transform.h"
#include "engine/ops/loss_sum.h"
#include "engine/ops/mla_heads.h"
#include "engine/ops/moe_permute.h"
#include "engine/ops/normal_init.h"
#include "engine/ops/rms_norm.h"
#include "engine/ops/rotary.h"
#include "engine/ops/router.h"
#include "engine/ops/scale.h"
#include "engine/ops/softmax_cross_entropy.h"
#include "engine/ops/squared_relu.h"
#include "engine/ops/swiglu.h"
#include "engine/ops/vocab_cross_entropy.h"

namespace mbridge {
namespace {

TEST(CudaRegistration, OperatorsHaveCudaTwins) {
  EXPECT_NE(AttentionForward.cuda, nullptr);
  EXPECT_NE(AttentionBackward.cuda, nullptr);
  EXPECT_NE(FlashAttentionForward.cuda, nullptr);
  EXPECT_NE(FlashAttentionBackward.cuda, nullptr);
  EXPECT_NE(PrepareFlashAttention.cuda, nullptr);
  EXPECT_NE(AddSinksToFlash.cuda, nullptr);
  EXPECT_NE(FlashSinkGradients.cuda, nullptr);
  EXPECT_NE(BiasAdd.cuda, nullptr);
  EXPECT_NE(BiasGeluForward.cuda, nullptr);
  EXPECT_NE(BiasGeluBackward.cuda, nullptr);
  EXPECT_NE(BlockQuantize.cuda, nullptr);
  EXPECT_NE(HadamardDownRows.cuda, nullptr);
  EXPECT_NE(Fp8Amax.cuda, nullptr);
  EXPECT_NE(Fp8DelayedScales.cuda, nullptr);
  EXPECT_NE(Fp8Quantize.cuda, nullptr);
  EXPECT_NE(Fp8QuantizeByAmax.cuda, nullptr);
  EXPECT_NE(Fp8BlockQuantize.cuda, nullptr);
  EXPECT_NE(Fp8BlockProducts.cuda, nullptr);
  EXPECT_NE(Fp8Gemm.cuda, nullptr);
  EXPECT_NE(Convert.cuda, nullptr);
  EXPECT_NE(Dropout.cuda, nullptr);
  EXPECT_NE(BiasDropoutAddForward.cuda, nullptr);
  EXPECT_NE(BiasDropoutAddBackward.cuda, nullptr);
  EXPECT_NE(DrawEagerDropoutMask.cuda, nullptr);
  EXPECT_NE(DrawCompiledDropoutMask.cuda, nullptr);
  EXPECT_NE(DrawCompiledDropoutMaskAt.cuda, nullptr);
  EXPECT_NE(EmbeddingForward.cuda, nullptr);
  EXPECT_NE(EmbeddingBackward.cuda, nullptr);
  EXPECT_NE(LocalPlaces.cuda, nullptr);
  EXPECT_NE(StreamPlaces.cuda, nullptr);
  EXPECT_NE(Gemm.cuda, nullptr);
  EXPECT_NE(AddGradient.cuda, nullptr);
  EXPECT_NE(AddColumnSums.cuda, nullptr);
  EXPECT_NE(LayerNormForward.cuda, nullptr);
  EXPECT_NE(LayerNormBackward.cuda, nullptr);
  EXPECT_NE(SetTargets.cuda, nullptr);
  EXPECT_NE(AddLossSums.cuda, nullptr);
  EXPECT_NE(DrawNormal.cuda, nullptr);
  EXPECT_NE(RmsNormForward.cuda, nullptr);
  EXPECT_NE(AddRmsNormForward.cuda, nullptr);
  EXPECT_NE(RmsNormBackward.cuda, nullptr);
  EXPECT_NE(QkNormForward.cuda, nullptr);
  EXPECT_NE(QkNormBackward.cuda, nullptr);
  EXPECT_NE(QkNormSquares.cuda, nullptr);
  EXPECT_NE(QkNormDots.cuda, nullptr);
  EXPECT_NE(Rotary.cuda, nullptr);
  EXPECT_NE(Scale.cuda, nullptr);
  EXPECT_NE(SoftmaxCrossEntropy.cuda, nullptr);
  EXPECT_NE(GegluForward.cuda, nullptr);
  EXPECT_NE(GegluBackward.cuda, nullptr);
  EXPECT_NE(SquaredReluForward.cuda, nullptr);
  EXPECT_NE(SquaredReluBackward.cuda, nullptr);
  EXPECT_NE(TransformLogits.cuda, nullptr);
  EXPECT_NE(TransformLogitsBackward.cuda, nullptr);
  EXPECT_NE(SwiGluForward.cuda, nullptr);
  EXPECT_NE(SwiGluBackward.cuda, nullptr);
  EXPECT_NE(SwiGluForwardWithAmax.cuda, nullptr);
  EXPECT_NE(SwiGluBackwardWithAmax.cuda, nullptr);
  EXPECT_NE(CrossEntropyBegin.cuda, nullptr);
  EXPECT_NE(CrossEntropyFold.cuda, nullptr);
  EXPECT_NE(CrossEntropyRescale.cuda, nullptr);
  EXPECT_NE(CrossEntropyLoss.cuda, nullptr);
  EXPECT_NE(CrossEntropyGradient.cuda, nullptr);
}

TEST(CudaRegistration, OperatorsOfExpertsAndLatentAttentionHaveCudaTwins) {
  EXPECT_NE(RouterForward.cuda, nullptr);
  EXPECT_NE(RouterBackward.cuda, nullptr);
  EXPECT_NE(RouterBalanceLoss.cuda, nullptr);
  EXPECT_NE(UpdateExpertBias.cuda, nullptr);
  EXPECT_NE(SortByExpert.cuda, nullptr);
  EXPECT_NE(AddExpertLoad.cuda, nullptr);
  EXPECT_NE(GatherRows.cuda, nullptr);
  EXPECT_NE(SumRows.cuda, nullptr);
  EXPECT_NE(GroupedGemm.cuda, nullptr);
  EXPECT_NE(GroupedGemmInputGradient.cuda, nullptr);
  EXPECT_NE(GroupedGemmWeightGradient.cuda, nullptr);
  EXPECT_NE(ExpertActivationForward.cuda, nullptr);
  EXPECT_NE(ExpertActivationBackward.cuda, nullptr);
  EXPECT_NE(ExpertBiasAdd.cuda, nullptr);
  EXPECT_NE(ExpertBiasBackward.cuda, nullptr);
  EXPECT_NE(SharedGateForward.cuda, nullptr);
  EXPECT_NE(SharedGateBackward.cuda, nullptr);
  EXPECT_NE(MlaJoinHeads.cuda, nullptr);
  EXPECT_NE(MlaSplitHeads.cuda, nullptr);
  EXPECT_NE(CopyColumns.cuda, nullptr);
}

}  // namespace
}  // namespace mbridge
