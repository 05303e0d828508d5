// What failed calls of the libraries become. Needs no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/ops/cuda/cublas_check.h"
#include "engine/ops/cuda/flash_attention_graph.h"

namespace mbridge::cuda {
namespace {

v1::Reason ReasonOf(cublasStatus_t status) {
  try {
    MB_CUBLAS(status);
  } catch (const EngineError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(cublasLtGetStatusString(status)));
    return error.reason();
  }
  return v1::REASON_UNSPECIFIED;
}

TEST(LibraryErrors, CublasWithoutMemoryIsOutOfMemory) {
  EXPECT_EQ(ReasonOf(CUBLAS_STATUS_ALLOC_FAILED), v1::REASON_OUT_OF_MEMORY);
  EXPECT_EQ(ReasonOf(CUBLAS_STATUS_NOT_SUPPORTED), v1::REASON_ENGINE_ERROR);
  EXPECT_EQ(ReasonOf(CUBLAS_STATUS_EXECUTION_FAILED), v1::REASON_ENGINE_ERROR);
  EXPECT_EQ(ReasonOf(CUBLAS_STATUS_SUCCESS), v1::REASON_UNSPECIFIED);
}

TEST(LibraryErrors, CudnnWithoutMemoryIsRecognised) {
  if (!FlashAttentionBackend().empty()) GTEST_SKIP() << FlashAttentionBackend();
  EXPECT_TRUE(SaysAllocationFailed("x failed with message: , and code: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"));
  EXPECT_TRUE(SaysAllocationFailed("y cudnn_status: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"));
  EXPECT_TRUE(SaysAllocationFailed("cudaMalloc failed with out of memory"));
  EXPECT_FALSE(SaysAllocationFailed("No valid engine configs; code: CUDNN_STATUS_NOT_SUPPORTED"));
}

}  // namespace
}  // namespace mbridge::cuda
