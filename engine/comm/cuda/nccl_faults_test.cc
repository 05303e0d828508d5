// Needs no GPU.
#include "engine/comm/cuda/nccl_faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge::cuda {
namespace {

TEST(NcclFaults, MemoryThatNcclCouldNotHaveIsOutOfMemory) {
  for (const char* detail : {"Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",
                             "Failed to CUDA calloc 4194304 bytes", "Failed to CUDA host alloc 65536 bytes"}) {
    EXPECT_EQ(ReasonOfNccl(ncclUnhandledCudaError, detail), v1::REASON_OUT_OF_MEMORY) << detail;
  }
  for (const char* detail : {"Failed to malloc 4096 bytes", "Call to mmap failed: Cannot allocate memory"}) {
    EXPECT_EQ(ReasonOfNccl(ncclSystemError, detail), v1::REASON_OUT_OF_MEMORY) << detail;
  }
  EXPECT_EQ(ReasonOfNccl(ncclUnhandledCudaError, "Cuda failure 700 'an illegal memory access was encountered'"),
            v1::REASON_ENGINE_ERROR);
  EXPECT_EQ(ReasonOfNccl(ncclUnhandledCudaError, ""), v1::REASON_ENGINE_ERROR);
}

TEST(NcclFaults, OnlyConnectionsAreLostPeers) {
  EXPECT_EQ(ReasonOfNccl(ncclRemoteError, ""), v1::REASON_PEER_LOST);
  EXPECT_EQ(ReasonOfNccl(ncclRemoteError, "socketProgress: Connection closed by remote peer"), v1::REASON_PEER_LOST);
  for (const char* detail : {"Call to recv from 10.0.0.2<5> failed : Connection reset by peer",
                             "socketStartConnect: Connect to 10.0.0.2<5> failed : No route to host",
                             "Call to connect failed: Connection refused", "Call to sendmsg failed: Broken pipe"}) {
    EXPECT_EQ(ReasonOfNccl(ncclSystemError, detail), v1::REASON_PEER_LOST) << detail;
    EXPECT_EQ(NextStepOfNccl(ncclSystemError, detail), "") << detail;
  }
  for (const char* detail :
       {"Call to pthread_create failed: Operation not permitted", "Call to socket failed: Too many open files",
        "Error: failed to extend /dev/shm/nccl-x to 33030532 bytes, error: No space left on device (28)", ""}) {
    EXPECT_EQ(ReasonOfNccl(ncclSystemError, detail), v1::REASON_ENGINE_ERROR) << detail;
  }
  for (const ncclResult_t result : {ncclInternalError, ncclInvalidArgument, ncclInvalidUsage}) {
    EXPECT_EQ(ReasonOfNccl(result, "Connection refused"), v1::REASON_ENGINE_ERROR);
    EXPECT_EQ(NextStepOfNccl(result, ""), "");
  }
}

TEST(NcclFaults, SaysWhatToDoAboutTheMachine) {
  EXPECT_THAT(NextStepOfNccl(ncclSystemError, "failed to extend /dev/shm/nccl-x, error: No space left on device (28)"),
              testing::HasSubstr("--shm-size"));
  EXPECT_THAT(NextStepOfNccl(ncclSystemError, "Call to socket failed: Too many open files"), testing::HasSubstr("ulimit -n"));
  EXPECT_THAT(NextStepOfNccl(ncclSystemError, ""), testing::HasSubstr("NCCL_DEBUG=INFO"));
}

TEST(NcclFaults, RanksOnOneGpuAreToldToTakeOneEach) {
  EXPECT_THAT(NextStepOfNccl(ncclInvalidUsage, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000"),
              testing::HasSubstr("CUDA_VISIBLE_DEVICES=N"));
  EXPECT_EQ(NextStepOfNccl(ncclInternalError, "Duplicate GPU detected"), "");
}

}  // namespace
}  // namespace mbridge::cuda
