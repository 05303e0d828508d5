// Tensors, folders and ranks for the checkpoint tests.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/checkpoint/checkpoint.h"
#include "engine/comm/test_support.h"
#include "engine/core/failpoint.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() {
    std::string pattern = testing::TempDir() + "ckpt_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~CheckpointTest() override {
    SetFailpoints("");
    std::filesystem::remove_all(directory_);
  }

  static void SetFailpoints(const std::string& text) {
    setenv("MB_FAILPOINTS", text.c_str(), 1);
    ReloadFailpoints();
  }
  std::string Step(int step) const { return directory_ + "/run/step_0000000" + std::to_string(step); }
  std::vector<std::string> Entries() const {
    std::vector<std::string> names;
    if (!std::filesystem::exists(directory_ + "/run")) return names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_ + "/run")) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string directory_;
  std::unique_ptr<Communicator> self_ = MakeSelfCommunicator();
};

// A small model's state: BF16 weights and F32 optimizer state, values made from `seed`.
class State {
 public:
  explicit State(int seed, bool optimizer = true) {
    Add("embedding.weight", DType::kBF16, {12, 8}, seed);
    Add("norm.weight", DType::kBF16, {7}, seed + 1);
    if (!optimizer) return;
    Add("optimizer.state.exp_avg.embedding.weight", DType::kF32, {12, 8}, seed + 2);
    Add("optimizer.state.exp_avg.norm.weight", DType::kF32, {7}, seed + 3);
  }
  std::vector<CheckpointTensor>& tensors() { return tensors_; }
  CheckpointTensor& operator[](size_t i) { return tensors_[i]; }

  void Add(const std::string& name, DType dtype, const Shape& shape, int seed) {
    memory_.push_back(std::make_unique<std::vector<char>>(static_cast<size_t>(shape.NumElements()) * SizeOf(dtype) + 1));
    const Tensor tensor{memory_.back()->data(), dtype, DeviceType::kCpu, shape};
    for (int64_t i = 0; i < tensor.size(); ++i) {
      const float value = static_cast<float>(seed * 1000 + i) / 16.0f;
      if (dtype == DType::kF32) std::memcpy(static_cast<char*>(tensor.data) + 4 * i, &value, 4);
      const BFloat16 rounded = ToBFloat16(value);
      if (dtype == DType::kBF16) std::memcpy(static_cast<char*>(tensor.data) + 2 * i, &rounded, 2);
    }
    tensors_.push_back({name, shape, shape, -1, 0, 0, tensor, true});
  }
  bool operator==(const State& other) const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (*memory_[i] != *other.memory_[i]) return false;
    }
    return memory_.size() == other.memory_.size();
  }

 private:
  std::vector<std::unique_ptr<std::vector<char>>> memory_;
  std::vector<CheckpointTensor> tensors_;
};

inline CheckpointMeta MetaOf(int step) {
  return {.step = step,
          .consumed_samples = 32 * step,
          .run_name = "run",
          .job_id = "job-1",
          .build_id = "test",
          .attempt = 2,
          .config_text = "train:\n  micro_batch_size: 4 # \"é\"\n",
          .state_json = R"({"rng":{"seed":1234},"loss_scale":1.5})"};
}

}  // namespace mbridge
