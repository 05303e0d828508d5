// Every operator that the optimizer uses has a CUDA twin. Needs no GPU.
#include <gtest/gtest.h>

#include "engine/optim/update_ops.h"

namespace mbridge {
namespace {

TEST(CudaRegistration, OperatorsOfTheOptimizerHaveCudaTwins) {
  EXPECT_NE(SumOfSquares.cuda, nullptr);
  EXPECT_NE(SumByParameter.cuda, nullptr);
  EXPECT_NE(CountZeros.cuda, nullptr);
  EXPECT_NE(UpdatePieces.cuda, nullptr);
}

}  // namespace
}  // namespace mbridge
