// Whether cuDNN has an engine on an H200 for every kind of attention, without one: the device is described to it. Nothing runs.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <gtest/gtest.h>

#include "engine/ops/cuda/flash_attention_graph.h"

// cudnn-frontend asks the CUDA runtime for the device even where it has been described: in this program it is told of one.
extern "C" cudaError_t __wrap_cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" cudaError_t __wrap_cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  properties->major = 9;
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}

namespace mbridge::cuda {
namespace {

constexpr char kH200[] = R"({"deviceName":"NVIDIA H200","cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"isTccDriver":0,
"l2CacheSize":62914560,"maxBlockSize":[1024,1024,64],"maxCtasPerSM":32,"maxGridSize":[2147483647,65535,65535],
"maxRegistersPerSM":65536,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,"maxThreadsPerBlock":1024,
"maxThreadsPerSM":2048,"memClockRateKHz":3201000,"multiProcessorCount":132,"pciDeviceId":0,"regsPerBlock":65536,
"reservedSharedMemoryPerBlock":1024,"smClockRateKHz":1980000,"supportCoopLaunch":1,"totalGlobalMem":150000000000,"warpSize":32})";

class FlashAttentionPlan : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = FlashAttentionBackend(); !reason.empty()) GTEST_SKIP() << reason;
    // The toolkit's stub answers for a missing driver: it calls itself libcuda.so.1.
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr && dlopen(MB_CUDA_STUB, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      GTEST_SKIP() << "neither a driver nor the toolkit's stub of one: " << dlerror();
    }
  }
};

TEST_F(FlashAttentionPlan, EveryVariantHasAnEngineAndFitsTheWorkspace) {
  struct Case {
    int64_t s, b, heads, groups, d, window;
    bool deterministic;
    int64_t value_size = 0, sequences = 0;
    double dropout = 0.0;
  };
  for (const Case& c : {Case{8192, 1, 32, 8, 64, 0, false},
                        Case{8192, 1, 32, 8, 128, 0, false},
                        Case{8192, 1, 64, 8, 128, 0, false},
                        Case{1024, 64, 12, 12, 64, 0, false},
                        Case{512, 4, 4, 4, 64, 0, true},
                        Case{1000, 2, 4, 2, 96, 0, false},
                        Case{4096, 2, 8, 2, 192, 0, false},
                        Case{2048, 1, 8, 4, 256, 0, false},
                        Case{4096, 1, 8, 2, 128, 1024, false},
                        Case{257, 2, 4, 2, 64, 64, false},
                        Case{512, 1, 8, 2, 64, 0, true},
                        Case{2, 1, 2, 2, 64, 0, false},
                        Case{2, 1, 2, 2, 64, 0, true},
                        Case{4096, 1, 16, 16, 192, 0, false, 128},
                        Case{300, 2, 4, 4, 192, 0, false, 128},
                        Case{4096, 1, 32, 8, 64, 0, false, 0, 0, 0.1},
                        Case{512, 4, 4, 4, 64, 0, false, 0, 0, 0.1},
                        Case{8192, 1, 32, 8, 128, 0, false, 0, 16},
                        Case{8192, 1, 32, 8, 64, 0, false, 0, 64},
                        Case{1000, 2, 4, 4, 128, 0, false, 0, 3},
                        Case{4096, 1, 8, 2, 128, 1024, false, 0, 8},
                        Case{4096, 1, 16, 16, 192, 0, false, 128, 8},
                        Case{2048, 1, 8, 2, 256, 0, false, 0, 4},
                        Case{2048, 1, 8, 2, 96, 0, false, 0, 4},
                        Case{2048, 1, 8, 2, 64, 0, false, 0, 4, 0.1},
                        Case{130, 1, 4, 2, 96, 33, false},
                        Case{201, 1, 2, 1, 192, 70, false},
                        Case{150, 2, 2, 2, 256, 64, false},
                        Case{64, 2, 4, 2, 64, 0, false, 0, 0, 0.25},
                        Case{64, 2, 4, 2, 96, 0, false, 0, 0, 0.25},
                        Case{64, 2, 4, 2, 128, 0, false, 0, 0, 0.25},
                        Case{64, 2, 4, 2, 192, 0, false, 0, 0, 0.25},
                        Case{64, 2, 4, 2, 256, 0, false, 0, 0, 0.25}}) {
    const FlashAttentionOptions options{.seq_length = c.s,
                                        .batch = c.b,
                                        .heads = c.heads,
                                        .groups = c.groups,
                                        .head_size = c.d,
                                        .scale = 0.125f,
                                        .window = c.window,
                                        .deterministic = c.deterministic,
                                        .value_size = c.value_size,
                                        .sequences = c.sequences,
                                        .dropout = c.dropout};
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const bool backward : {false, true}) {
        SCOPED_TRACE(
            fmt::format("s {} b {} heads {} groups {} d {} values {} window {} deterministic {} sequences {} dropout {} {} {}",
                        c.s, c.b, c.heads, c.groups, c.d, c.value_size, c.window, c.deterministic, c.sequences, c.dropout,
                        NameOf(dtype), backward ? "backward" : "forward"));
        EXPECT_NO_THROW(FlashAttentionGraph::CheckOnDescribedGpu(options, dtype, backward, kH200));
      }
    }
  }
}
TEST_F(FlashAttentionPlan, RefusalsCarryCudnnsWords) {
  const FlashAttentionOptions options{.seq_length = 64, .batch = 1, .heads = 2, .groups = 2, .head_size = 300};
  try {
    FlashAttentionGraph::CheckOnDescribedGpu(options, DType::kBF16, true, kH200);
    ADD_FAILURE() << "a head size of 300 was accepted";
  } catch (const EngineError& error) {
    EXPECT_NE(std::string(error.what()).find("hidden_dim"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace mbridge::cuda
