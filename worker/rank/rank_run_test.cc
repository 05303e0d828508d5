// Ends of a rank for want of memory, on a GPU of host memory that has less to give than it says.
#include "worker/rank/rank_run.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/comm/nccl.h"
#include "engine/core/device.h"
#include "engine/core/error.h"
#include "engine/core/side_stream.h"
#include "engine/train/training_plan.h"
#include "recipes/config/resolve.h"

namespace mbridge {
namespace {

using testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class SmallGpu : public Device {
 public:
  int64_t said_free = 0, really_free = 0;
  bool has_context = true;  // Else there is no room for it.

  void* Allocate(size_t bytes, const char* purpose) override {
    if (static_cast<int64_t>(bytes) > really_free) {
      throw EngineError(v1::REASON_OUT_OF_MEMORY,
                        fmt::format("cannot allocate {} MiB of GPU memory for {}", bytes >> 20, purpose));
    }
    really_free -= static_cast<int64_t>(bytes);
    return std::malloc(bytes);
  }
  void Free(void* memory) override { std::free(memory); }
  void* AllocateHost(size_t bytes) override { return std::malloc(bytes); }
  void FreeHost(void* memory) override { std::free(memory); }
  void Zero(const Context&, void* memory, size_t bytes) override { std::memset(memory, 0, bytes); }
  void CopyToDevice(const Context&, void* to, const void* host, size_t bytes) override { std::memcpy(to, host, bytes); }
  void CopyToHost(const Context&, void* host, const void* from, size_t bytes) override { std::memcpy(host, from, bytes); }
  void CopyOnDevice(const Context&, void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void* CreateEvent() override { return nullptr; }
  void Record(const Context&, void*) override {}
  void WaitFor(void*) override {}
  Context MakeContext(size_t workspace_bytes) override {
    return {DeviceType::kCuda, nullptr, has_context ? nullptr : Allocate(workspace_bytes, "operator workspace"), 0};
  }
  void Synchronize(const Context&) override {}
  std::unique_ptr<SideStream> MakeSideStream(const Context&, int) override { return nullptr; }
  void BeginRecording(const Context&) override { ThrowEngineError("no graphs"); }
  Graph EndRecording(const Context&) override { return {}; }
  void DropRecording(const Context&) override {}
  void Launch(const Context&, const Graph&) override {}
  Memory MemoryNow() override { return {said_free, said_free}; }
};

class RankRunTest : public testing::Test {
 protected:
  RankRunTest() { RegisterDevice(DeviceType::kCuda, &gpu_); }
  ~RankRunTest() override {
    RegisterDevice(DeviceType::kCuda, nullptr);
    RegisterNccl(nullptr);
  }

  v1::RankResult Run(int ranks = 1) {
    recipes::ResolveRequest request;
    request.recipe = "vanilla_gpt";
    request.overrides = {"model.num_layers=2",          "model.hidden_size=128",
                         "model.num_attention_heads=4", "model.ffn_hidden_size=512",
                         "model.seq_length=1024",       "dataset.seq_length=1024",
                         "train.micro_batch_size=8",    fmt::format("train.global_batch_size={}", 8 * ranks),
                         "tokenizer.vocab_size=20000",  "train.train_iters=2",
                         "scheduler.lr_warmup_iters=1", "scheduler.lr_decay_iters=2"};
    request.ranks = ranks;
    request.device = v1::DEVICE_CUDA;
    const auto resolved = recipes::Resolve(request);
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    v1::RankSpec spec;
    spec.set_world_size(ranks);
    *spec.mutable_resolved() = *resolved;
    TrainingPlan plan = *MakeTrainingPlan(*resolved);
    plan.device = DeviceType::kCuda;
    return ResultOf(
        [&] { return RunTraining(spec, plan, MakeRankContext(spec, plan), "", nullptr, [](const v1::RankResult&) {}); });
  }

  SmallGpu gpu_;
};

TEST_F(RankRunTest, AGpuThatIsFullAtTheStartIsRefusedWithWhatFits) {
  gpu_.said_free = gpu_.really_free = 100 * kMiB;
  const v1::RankResult result = Run();
  EXPECT_EQ(result.reason(), v1::REASON_OUT_OF_MEMORY) << result.detail();
  EXPECT_THAT(result.detail(), HasSubstr("100 MiB are there"));
  EXPECT_THAT(result.detail(), HasSubstr("What fits"));
}

TEST_F(RankRunTest, AGpuThatFillsUpAfterTheStartEndsTheRankWithNumbersAndTheNextStep) {
  gpu_.said_free = 16384 * kMiB;
  gpu_.really_free = 1 * kMiB;  // Somebody took it since.
  const v1::RankResult result = Run();
  EXPECT_EQ(result.reason(), v1::REASON_OUT_OF_MEMORY) << result.detail();
  EXPECT_THAT(result.detail(), HasSubstr("cannot allocate "));
  EXPECT_THAT(result.detail(), HasSubstr("planned for this rank: weights "));
  EXPECT_THAT(result.detail(), HasSubstr("16384 MiB were there at the start"));
  EXPECT_THAT(result.detail(), HasSubstr("take a layout that needs less:\n  train.micro_batch_size=1 ("));
}

TEST_F(RankRunTest, AGpuWithoutRoomForTheContextEndsTheRankWithThePlan) {
  gpu_.said_free = gpu_.really_free = 1 * kMiB;
  gpu_.has_context = false;
  const v1::RankResult result = Run();
  EXPECT_EQ(result.reason(), v1::REASON_OUT_OF_MEMORY) << result.detail();
  EXPECT_THAT(result.detail(), HasSubstr("for operator workspace"));
  EXPECT_THAT(result.detail(), HasSubstr("planned for this rank: weights "));
  EXPECT_THAT(result.detail(), HasSubstr("nvidia-smi"));
}

TEST_F(RankRunTest, NcclWithoutMemoryEndsTheRankWithThePlan) {
  gpu_.said_free = gpu_.really_free = 16384 * kMiB;
  RegisterNccl([](const NcclOptions&) -> std::unique_ptr<Communicator> {
    throw EngineError(v1::REASON_OUT_OF_MEMORY, "connecting in group world: out of memory");
  });
  const v1::RankResult result = Run(2);
  EXPECT_EQ(result.reason(), v1::REASON_OUT_OF_MEMORY) << result.detail();
  EXPECT_THAT(result.detail(), HasSubstr("connecting in group world"));
  EXPECT_THAT(result.detail(), HasSubstr("planned for this rank: weights "));
  EXPECT_THAT(result.detail(), HasSubstr("16384 MiB were there at the start"));
}

TEST_F(RankRunTest, HostMemoryThatIsMissingIsNotBlamedOnTheGpu) {
  gpu_.said_free = gpu_.really_free = 16384 * kMiB;
  RegisterNccl([](const NcclOptions&) -> std::unique_ptr<Communicator> { throw std::bad_alloc(); });
  const v1::RankResult result = Run(2);
  EXPECT_EQ(result.reason(), v1::REASON_OUT_OF_MEMORY) << result.detail();
  EXPECT_THAT(result.detail(), HasSubstr("an allocation of host memory failed; planned for this rank: weights "));
  EXPECT_THAT(result.detail(), HasSubstr("fewer ranks on this node"));
}

}  // namespace
}  // namespace mbridge
