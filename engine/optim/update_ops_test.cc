#include "engine/optim/update_ops.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "engine/optim/optimizer.h"

namespace mbridge {
namespace {

std::unique_ptr<ParameterStore> MakeStore() {
  auto store = std::make_unique<ParameterStore>(DType::kBF16, DeviceType::kCpu);
  store->Add({.name = "weight", .shape = {130, 300}, .global_shape = {130, 300}});
  store->Add({.name = "bias", .shape = {301}, .global_shape = {301}, .weight_decay = false});
  store->Allocate();
  return store;
}

// Three steps from the same weights and gradients; the values.
std::vector<BFloat16> Train(const OptimizerOptions& options, std::vector<float>* masters) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore();
  std::mt19937 engine(1);
  std::uniform_real_distribution<float> uniform(-0.1f, 0.1f);
  BFloat16* values = store->values().as<BFloat16>();
  for (int64_t i = 0; i < store->values().size(); ++i) values[i] = ToBFloat16(uniform(engine));
  Optimizer optimizer(store.get(), options, self.get());
  for (int step = 0; step < 3; ++step) {
    for (int64_t i = 0; i < store->main_grads().size(); ++i) store->main_grads().as<float>()[i] = uniform(engine);
    EXPECT_TRUE(optimizer.Step(1e-3, 0.1).updated);
  }
  if (masters != nullptr) {
    const Tensor tensor = optimizer.StateTensors().front().tensor;
    if (options.split_masters) {
      for (int64_t i = 0; i < tensor.size(); ++i) {
        const uint32_t lower = tensor.as<BFloat16>()[i].bits, value = values[i].bits;
        masters->push_back(std::bit_cast<float>((value - (lower >> 15)) << 16 | lower));
      }
    } else {
      masters->assign(tensor.as<float>(), tensor.as<float>() + tensor.size());
    }
  }
  return {values, values + store->values().size()};
}

TEST(UpdateOps, SplitMastersAreTheSameNumbers) {
  OptimizerOptions split;
  split.split_masters = true;
  std::vector<float> whole_masters, split_masters;
  const std::vector<BFloat16> whole = Train({}, &whole_masters), parts = Train(split, &split_masters);
  EXPECT_EQ(whole_masters, split_masters);
  int64_t different = 0;  // Ties round up.
  for (size_t i = 0; i < whole.size(); ++i) different += whole[i].bits != parts[i].bits;
  EXPECT_LE(different, 4) << "of " << whole.size();
}

TEST(UpdateOps, NarrowMomentsMoveWeightsAlmostAlike) {
  OptimizerOptions narrow;
  narrow.moment_dtype = DType::kBF16;
  std::vector<float> wide_masters, narrow_masters;
  Train({}, &wide_masters);
  Train(narrow, &narrow_masters);
  double worst = 0;
  for (size_t i = 0; i < wide_masters.size(); ++i) worst = std::max(worst, std::abs(wide_masters[i] - 1.0 * narrow_masters[i]));
  EXPECT_GT(worst, 0);
  EXPECT_LT(worst, 3e-5);  // Three steps of at most 1e-3, each within a BF16 step.
}

TEST(UpdateOps, NarrowStateTakesHalfTheMemory) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore();
  OptimizerOptions narrow;
  narrow.moment_dtype = DType::kBF16;
  narrow.split_masters = true;
  const Optimizer small(store.get(), narrow, self.get()), large(store.get(), {}, self.get());
  EXPECT_EQ(2 * small.StateBytes(), large.StateBytes());
  EXPECT_EQ(small.StateTensors().front().name, "optimizer.state.fp32_param_remainder.weight");
}

TEST(UpdateOps, OnlyBF16MastersAreSplit) {
  const auto self = MakeSelfCommunicator();
  ParameterStore store(DType::kF16, DeviceType::kCpu);
  store.Add({.name = "weight", .shape = {8}, .global_shape = {8}});
  store.Allocate();
  OptimizerOptions options;
  options.split_masters = true;
  EXPECT_THROW(Optimizer(&store, options, self.get()), EngineError);
}

}  // namespace
}  // namespace mbridge
