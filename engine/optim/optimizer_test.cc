#include "engine/optim/optimizer.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include "engine/comm/test_support.h"

namespace mbridge {
namespace {

// Sizes below, at and above the block of 16384 elements, a no-decay vector between.
const std::vector<ParameterSpec>& Specs() {
  static const auto* specs =
      new std::vector<ParameterSpec>{{.name = "embedding.weight", .shape = {97, 300}, .global_shape = {97, 300}},
                                     {.name = "norm.weight", .shape = {301}, .global_shape = {301}, .weight_decay = false},
                                     {.name = "linear.weight", .shape = {128, 128}, .global_shape = {128, 128}},
                                     {.name = "linear.bias", .shape = {5}, .global_shape = {5}, .weight_decay = false}};
  return *specs;
}

float Noise(uint64_t seed) {
  seed = (seed + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  seed ^= seed >> 29;
  seed *= 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<int64_t>(seed >> 24)) * 0x1p-40f * 2.0f - 1.0f;
}

std::unique_ptr<ParameterStore> MakeStore(DType dtype) {
  auto store = std::make_unique<ParameterStore>(dtype, DeviceType::kCpu);
  for (const ParameterSpec& spec : Specs()) store->Add(spec);
  store->Allocate();
  uint64_t seed = 1;
  for (const Parameter& parameter : store->parameters()) {
    for (int64_t i = 0; i < parameter.value.size(); ++i) {
      const float value = 0.1f * Noise(seed++);
      if (dtype == DType::kF32) parameter.value.as<float>()[i] = value;
      if (dtype == DType::kBF16) parameter.value.as<BFloat16>()[i] = ToBFloat16(value);
      if (dtype == DType::kF16) parameter.value.as<Float16>()[i] = ToFloat16(value);
    }
  }
  return store;
}

void FillGradients(const ParameterStore& store, uint64_t step, float scale, int rank = 0) {
  uint64_t seed = 1000003 * (step + 1) + 7777777 * static_cast<uint64_t>(rank);
  for (const Parameter& parameter : store.parameters()) {
    for (int64_t i = 0; i < parameter.main_grad.size(); ++i) parameter.main_grad.as<float>()[i] = scale * Noise(seed++);
  }
}

float ValueAt(const Tensor& tensor, int64_t i) {
  if (tensor.dtype == DType::kBF16) return ToFloat(tensor.as<BFloat16>()[i]);
  if (tensor.dtype == DType::kF16) return ToFloat(tensor.as<Float16>()[i]);
  return tensor.as<float>()[i];
}

// AdamW (Loshchilov and Hutter) with clipping, in double.
class Reference {
 public:
  Reference(const ParameterStore& store, const OptimizerOptions& options) : options_(options) {
    for (const Parameter& parameter : store.parameters()) {
      std::vector<double> values;
      for (int64_t i = 0; i < parameter.value.size(); ++i) values.push_back(ValueAt(parameter.value, i));
      moments1_.emplace_back(values.size(), 0.0);
      moments2_.emplace_back(values.size(), 0.0);
      masters_.push_back(std::move(values));
    }
  }

  double Step(const ParameterStore& store, double lr, double weight_decay, double loss_scale = 1) {
    double squares = 0;
    for (const Parameter& parameter : store.parameters()) {
      for (int64_t i = 0; i < parameter.main_grad.size(); ++i)
        squares += std::pow(parameter.main_grad.as<float>()[i] / loss_scale, 2);
    }
    const double norm = std::sqrt(squares);
    const double clip = options_.clip_grad > 0 ? std::min(1.0, options_.clip_grad / (norm + 1e-6)) : 1.0;
    const AdamOptions& adam = options_.adam;
    ++step_;
    for (size_t p = 0; p < masters_.size(); ++p) {
      const Parameter& parameter = store.parameters()[p];
      const double decay = parameter.spec.weight_decay ? weight_decay : 0.0;
      for (size_t i = 0; i < masters_[p].size(); ++i) {
        double& w = masters_[p][i];
        double g = parameter.main_grad.as<float>()[i] / loss_scale * clip;
        if (adam.decoupled_weight_decay)
          w -= lr * decay * w;
        else
          g += decay * w;
        moments1_[p][i] = adam.beta1 * moments1_[p][i] + (1 - adam.beta1) * g;
        moments2_[p][i] = adam.beta2 * moments2_[p][i] + (1 - adam.beta2) * g * g;
        const double m = moments1_[p][i] / (1 - std::pow(adam.beta1, step_));
        const double v = moments2_[p][i] / (1 - std::pow(adam.beta2, step_));
        w -= lr * m / (std::sqrt(v) + adam.eps);
      }
    }
    return norm;
  }

  double master(size_t parameter, int64_t i) const { return masters_[parameter][static_cast<size_t>(i)]; }

 private:
  OptimizerOptions options_;
  std::vector<std::vector<double>> masters_, moments1_, moments2_;
  int step_ = 0;
};

const OptimizerStateTensor& StateOf(const std::vector<OptimizerStateTensor>& tensors, const std::string& name) {
  for (const OptimizerStateTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << name;
  return tensors.front();
}

void ExpectFollowsReference(DType dtype, const OptimizerOptions& options, float gradient_scale, double tolerance,
                            float loss_scale = 1) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore(dtype);
  Reference reference(*store, options);
  Optimizer optimizer(store.get(), options, self.get());
  for (int step = 0; step < 6; ++step) {
    const double lr = 1e-2 / (step + 1), weight_decay = 0.1;
    FillGradients(*store, static_cast<uint64_t>(step), gradient_scale * loss_scale);
    optimizer.ReduceGradients();
    const StepResult result = optimizer.Step(lr, weight_decay);
    const double norm = reference.Step(*store, lr, weight_decay, loss_scale);
    ASSERT_TRUE(result.updated);
    EXPECT_NEAR(result.gradient_norm / norm, 1, 3e-7) << step;
  }
  EXPECT_EQ(optimizer.step_count(), 6);
  const std::vector<OptimizerStateTensor> state = optimizer.StateTensors();
  for (size_t p = 0; p < Specs().size(); ++p) {
    const Parameter& parameter = store->parameters()[p];
    const Tensor master =
        dtype == DType::kF32 ? parameter.value : StateOf(state, "optimizer.state.fp32_param." + parameter.spec.name).tensor;
    double worst = 0;
    int64_t unrounded = 0;
    for (int64_t i = 0; i < parameter.value.size(); ++i) {
      worst = std::max(worst, std::abs(master.as<float>()[i] - reference.master(p, i)));
      const float rounded = dtype == DType::kBF16  ? ToFloat(ToBFloat16(master.as<float>()[i]))
                            : dtype == DType::kF16 ? ToFloat(ToFloat16(master.as<float>()[i]))
                                                   : master.as<float>()[i];
      unrounded += ValueAt(parameter.value, i) != rounded ? 1 : 0;
    }
    EXPECT_LT(worst, tolerance) << parameter.spec.name;
    EXPECT_EQ(unrounded, 0) << parameter.spec.name;
  }
}

// Steps of 1e-2 on weights of 0.1: a missing decay moves weights by 1e-4 a step, a missing bias correction by far more.
TEST(Optimizer, FollowsAdamWInDouble) {
  ExpectFollowsReference(DType::kF32, {}, 1e-3f, 1e-7);
  ExpectFollowsReference(DType::kBF16, {}, 1e-3f, 1e-7);
}

TEST(Optimizer, FollowsAdamWWithOtherConstants) {
  OptimizerOptions options;
  options.adam = {.beta1 = 0.3, .beta2 = 0.5, .eps = 1e-3};  // beta1 below 0.5 takes the other branch of lerp.
  ExpectFollowsReference(DType::kF32, options, 1e-3f, 1e-7);
  options.adam = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decoupled_weight_decay = false};
  ExpectFollowsReference(DType::kF32, options, 1e-2f, 5e-7);
}

TEST(Optimizer, ClipsByTheGlobalNorm) {
  OptimizerOptions options;
  options.adam.eps = 1e-2;  // So that the size of gradients matters.
  options.clip_grad = 0.5;
  ExpectFollowsReference(DType::kBF16, options, 1.0f, 1e-7);
  options.clip_grad = 0;
  ExpectFollowsReference(DType::kBF16, options, 1.0f, 1e-7);
}

TEST(Optimizer, RemovesTheLossScale) {
  OptimizerOptions options;
  options.adam.eps = 1e-2;
  options.loss_scaler = {.dynamic = true, .initial_scale = 65536.0f};
  ExpectFollowsReference(DType::kF16, options, 1.0f, 1e-7, 65536.0f);
}

// Exact float arithmetic of one element against the published order of operations.
TEST(AdamUpdate, RoundsEveryOperation) {
  const AdamFactors f = MakeAdamFactors({.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8}, 3, 3e-4, 0.1, 1.0f, 1.0f);
  EXPECT_EQ(f.decay_multiplier, static_cast<float>(1 - 3e-4 * 0.1));
  EXPECT_EQ(f.negative_step, static_cast<float>(-(3e-4 / (1 - std::pow(0.9, 3.0)))));
  EXPECT_EQ(f.root_correction, static_cast<float>(std::sqrt(1 - std::pow(0.95, 3.0))));
  for (int i = 0; i < 1000; ++i) {
    float g[9], m[9], v[9], p[9], m0[9], v0[9], p0[9];
    BFloat16 w[9];
    for (int k = 0; k < 9; ++k) {
      const uint64_t at = 4 * (9 * static_cast<uint64_t>(i) + static_cast<uint64_t>(k));
      g[k] = Noise(at);
      m0[k] = m[k] = Noise(at + 1);
      v0[k] = v[k] = std::abs(Noise(at + 2));
      p0[k] = p[k] = Noise(at + 3);
    }
    AdamUpdate(f, 9, g, m, v, p, w);
    for (int k = 0; k < 9; ++k) {
      volatile float decayed = p0[k] * f.decay_multiplier;
      volatile float difference = g[k] - m0[k];
      volatile float weighted = f.first_weight * difference;
      volatile float first = m0[k] + weighted;
      volatile float kept = v0[k] * f.second_keep;
      volatile float square = g[k] * g[k];
      volatile float added = f.second_weight * square;
      volatile float second = kept + added;
      volatile float root = std::sqrt(second);
      volatile float corrected = root / f.root_correction;
      volatile float denominator = corrected + f.eps;
      volatile float quotient = first / denominator;
      volatile float change = f.negative_step * quotient;
      volatile float result = decayed + change;
      ASSERT_EQ(m[k], first);
      ASSERT_EQ(v[k], second);
      ASSERT_EQ(p[k], result);
      ASSERT_EQ(w[k].bits, ToBFloat16(result).bits);
    }
  }
}

TEST(Optimizer, AnOverflowSkipsTheStepAndLowersTheScale) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore(DType::kF16);
  OptimizerOptions options;
  options.loss_scaler = {.dynamic = true, .initial_scale = 1024, .hysteresis = 1};
  Optimizer optimizer(store.get(), options, self.get());
  const std::vector<char> before(static_cast<char*>(store->values().data),
                                 static_cast<char*>(store->values().data) + store->values().bytes());
  FillGradients(*store, 0, 1.0f);
  EXPECT_EQ(optimizer.FindNonFiniteGradient(), "");
  store->parameters()[2].main_grad.as<float>()[16383] = std::numeric_limits<float>::infinity();
  const StepResult result = optimizer.Step(1e-2, 0.1);
  EXPECT_FALSE(result.updated);
  EXPECT_EQ(result.loss_scale, 1024);
  EXPECT_EQ(optimizer.loss_scaler().scale(), 512);
  EXPECT_EQ(optimizer.step_count(), 0);
  EXPECT_EQ(std::memcmp(before.data(), store->values().data, before.size()), 0);
  EXPECT_EQ(optimizer.FindNonFiniteGradient(), "linear.weight");
  store->parameters()[2].main_grad.as<float>()[16383] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(optimizer.Step(1e-2, 0.1).updated);
}

TEST(Optimizer, CountsZerosAndMeasuresParameters) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore(DType::kBF16);
  OptimizerOptions options;
  options.count_zero_gradients = true;
  Optimizer optimizer(store.get(), options, self.get());
  double squares = 0;
  for (const Parameter& parameter : store->parameters()) {
    for (int64_t i = 0; i < parameter.value.size(); ++i) squares += std::pow(static_cast<double>(ValueAt(parameter.value, i)), 2);
  }
  EXPECT_NEAR(optimizer.ParameterNorm() / std::sqrt(squares), 1, 2e-7);
  FillGradients(*store, 0, 1.0f);
  store->parameters()[0].main_grad.as<float>()[20000] = 0.0f;
  store->parameters()[3].main_grad.as<float>()[4] = -0.0f;
  EXPECT_EQ(optimizer.Step(1e-3, 0).zero_gradients, 2);
}

TEST(Optimizer, ResultsDoNotDependOnThreads) {
  const auto self = MakeSelfCommunicator();
  std::vector<std::vector<char>> results;
  const int threads_before = omp_get_max_threads();
  for (int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    const auto store = MakeStore(DType::kBF16);
    OptimizerOptions options;
    options.clip_grad = 0.1;
    Optimizer optimizer(store.get(), options, self.get());
    for (uint64_t step = 0; step < 3; ++step) {
      FillGradients(*store, step, 1.0f);
      optimizer.Step(1e-2, 0.1);
    }
    results.emplace_back(static_cast<char*>(store->values().data),
                         static_cast<char*>(store->values().data) + store->values().bytes());
  }
  omp_set_num_threads(threads_before);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// State saved after two steps and put into a fresh optimizer gives the same third step.
TEST(Optimizer, ContinuesFromItsStateToTheBit) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore(DType::kBF16), copy = MakeStore(DType::kBF16);
  Optimizer optimizer(store.get(), {}, self.get()), resumed(copy.get(), {}, self.get());
  for (uint64_t step = 0; step < 2; ++step) {
    FillGradients(*store, step, 1.0f);
    optimizer.Step(1e-2, 0.1);
  }
  std::memcpy(copy->values().data, store->values().data, store->values().bytes());
  const auto from = optimizer.StateTensors(), to = resumed.StateTensors();
  ASSERT_EQ(from.size(), 3 * Specs().size());
  EXPECT_EQ(from[0].name, "optimizer.state.fp32_param.embedding.weight");
  EXPECT_EQ(from[0].tensor.shape, Specs()[0].shape);
  for (size_t i = 0; i < from.size(); ++i) std::memcpy(to[i].tensor.data, from[i].tensor.data, from[i].tensor.bytes());
  resumed.Restore(optimizer.step_count(), optimizer.loss_scaler().state());
  for (const auto& [target, which] : {std::pair{&optimizer, store.get()}, std::pair{&resumed, copy.get()}}) {
    FillGradients(*which, 2, 1.0f);
    target->Step(1e-2, 0.1);
  }
  EXPECT_EQ(std::memcmp(copy->values().data, store->values().data, store->values().bytes()), 0);
}

TEST(Optimizer, MastersFollowNewValues) {
  const auto self = MakeSelfCommunicator();
  const auto store = MakeStore(DType::kBF16);
  Optimizer optimizer(store.get(), {}, self.get());
  store->parameters()[1].value.as<BFloat16>()[7] = ToBFloat16(5.0f);
  optimizer.TakeMastersFromValues();
  EXPECT_EQ(StateOf(optimizer.StateTensors(), "optimizer.state.fp32_param.norm.weight").tensor.as<float>()[7], 5.0f);
}

// Runs `steps` on data-parallel ranks; the values and gradient norms of every rank.
struct Outcome {
  std::vector<std::vector<char>> values;
  std::vector<std::vector<float>> norms;
  std::vector<std::map<std::string, std::vector<float>>> states;  // Elements by their place in the parameter.
};

// With overlap as a model does it: gradients become final from the last parameter on, values are asked for from the first on.
Outcome TrainOnRanks(int ranks, bool sharded, DType dtype, const BucketOptions& buckets = {}) {
  std::string pattern = testing::TempDir() + "optim_XXXXXX";
  const std::string directory = mkdtemp(pattern.data());
  Outcome outcome{std::vector<std::vector<char>>(ranks), std::vector<std::vector<float>>(ranks), {}};
  outcome.states.resize(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto world = MakeGlooCommunicator({directory, "dp", rank, ranks, 30});
      const auto store = MakeStore(dtype);
      OptimizerOptions options;
      options.clip_grad = 0.1;
      options.shard_over_data_parallel = sharded;
      options.count_zero_gradients = true;
      options.buckets = buckets;
      Optimizer optimizer(store.get(), options, world.get());
      const int parameters = static_cast<int>(Specs().size());
      for (uint64_t step = 0; step < 3; ++step) {
        for (int end = 1; end <= parameters; ++end) optimizer.exchange().BeforeUse(end);
        FillGradients(*store, step, 1.0f, rank);
        if (step != 1) optimizer.exchange().BeginLastBackward();  // Else all is done after backward.
        for (int first = parameters; first-- > 0;) optimizer.exchange().GradientsAdded(first);
        optimizer.ReduceGradients();
        const StepResult result = optimizer.Step(1e-2, 0.1);
        outcome.norms[rank].push_back(result.gradient_norm);
        outcome.norms[rank].push_back(static_cast<float>(result.zero_gradients));
      }
      outcome.norms[rank].push_back(optimizer.ParameterNorm());
      optimizer.exchange().FinishGather();
      outcome.values[rank].assign(static_cast<char*>(store->values().data),
                                  static_cast<char*>(store->values().data) + store->values().bytes());
      for (const OptimizerStateTensor& tensor : optimizer.StateTensors()) {
        EXPECT_EQ(tensor.write_here, sharded || rank == 0);
        std::vector<float>& elements = outcome.states[rank][tensor.name];
        elements.resize(static_cast<size_t>(tensor.spec->shape.NumElements()), -12345.0f);
        std::memcpy(elements.data() + tensor.flat_begin, tensor.tensor.data, tensor.tensor.bytes());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove_all(directory);
  return outcome;
}

TEST(Optimizer, DataParallelGradientsAreTheMeanInRankOrder) {
  std::string pattern = testing::TempDir() + "optim_XXXXXX";
  const std::string directory = mkdtemp(pattern.data());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto world = MakeGlooCommunicator({directory, "dp", rank, 3, 30});
      const auto store = MakeStore(DType::kF32), other = MakeStore(DType::kF32);
      Optimizer optimizer(store.get(), {}, world.get());
      FillGradients(*store, 0, 1.0f, rank);
      optimizer.ReduceGradients();
      const float share = static_cast<float>(1.0 / 3);
      std::vector<float> expected(static_cast<size_t>(other->main_grads().size()), 0.0f);
      for (int from = 0; from < 3; ++from) {
        FillGradients(*other, 0, 1.0f, from);
        for (size_t i = 0; i < expected.size(); ++i) {
          const float scaled = other->main_grads().as<float>()[i] * share;
          expected[i] = from == 0 ? scaled : expected[i] + scaled;
        }
      }
      EXPECT_EQ(std::memcmp(expected.data(), store->main_grads().data, expected.size() * 4), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove_all(directory);
}

TEST(Optimizer, ShardedEqualsReplicatedToTheBit) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int ranks : {2, 3}) {
      const Outcome replicated = TrainOnRanks(ranks, false, dtype), sharded = TrainOnRanks(ranks, true, dtype);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(replicated.values[rank], replicated.values[0]);
        EXPECT_EQ(sharded.values[rank], replicated.values[0]);
        EXPECT_EQ(sharded.norms[rank], replicated.norms[0]);
      }
      // The pieces of all ranks make up the replicated state, each element on one rank.
      for (const auto& [name, elements] : replicated.states[0]) {
        for (size_t i = 0; i < elements.size(); ++i) {
          int owners = 0;
          for (const auto& state : sharded.states) {
            const auto found = state.find(name);
            if (found == state.end() || found->second[i] == -12345.0f) continue;
            ++owners;
            ASSERT_EQ(found->second[i], elements[i]) << name;
          }
          ASSERT_EQ(owners, 1) << name << " " << i;
        }
      }
    }
  }
}

TEST(Optimizer, BucketsAndOverlapChangeNoBit) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Outcome whole = TrainOnRanks(2, false, dtype);
    for (const bool sharded : {false, true}) {
      for (const auto& [reduce, gather] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
        const Outcome buckets =
            TrainOnRanks(2, sharded, dtype, {.elements = 1, .overlap_reduce = reduce, .overlap_gather = gather});
        for (int rank = 0; rank < 2; ++rank) {
          EXPECT_EQ(buckets.values[rank], whole.values[0]) << sharded << reduce << gather;
          EXPECT_EQ(buckets.norms[rank], whole.norms[0]) << sharded << reduce << gather;
          for (const auto& [name, elements] : buckets.states[rank]) {
            const std::vector<float>& expected = whole.states[0].at(name);
            for (size_t i = 0; i < elements.size(); ++i) {
              if (elements[i] == -12345.0f) continue;
              ASSERT_EQ(elements[i], expected[i]) << name << " " << i;
            }
          }
        }
      }
    }
  }
}

TEST(BucketExchange, BucketsAreWholeBlocksOfAllRanks) {
  EXPECT_EQ(BucketExchange::BucketElements({}, 2), 1221 * 2 * 16384);
  EXPECT_EQ(BucketExchange::BucketElements({}, 64), 62 * 64 * 16384);
  EXPECT_EQ(BucketExchange::BucketElements({.elements = 32768}, 2), 32768);
  EXPECT_EQ(BucketExchange::BucketElements({.elements = 32769}, 2), 65536);
  OnRanks(2, [](Communicator& world) {
    const auto store = MakeStore(DType::kF32);  // 29120 + 320 + 16384 + 32 elements.
    const BucketExchange exchange(store.get(), {.elements = 1}, true, &world, {});
    ASSERT_EQ(exchange.count(), 2);
    EXPECT_EQ(exchange.bucket(1).begin, 32768);
    EXPECT_EQ(exchange.bucket(1).end, 45856);
    EXPECT_EQ(exchange.own(0).begin, world.rank() * 16384);
    EXPECT_EQ(exchange.own(1).begin, world.rank() == 0 ? 32768 : 45856);
    EXPECT_EQ(exchange.own(1).end, 45856);
    EXPECT_THAT(exchange.Describe(), testing::HasSubstr("2 ranks, 2 buckets of up to 32768 elements"));
  });
}

// A bucket is reduced before backward is done, the one that backward still writes to is not.
TEST(BucketExchange, WarnsOfASizeThatMakesVeryManyBuckets) {
  const auto warning = [](int64_t elements, int64_t size, int ranks) {
    return BucketExchange::WarnOfManyBuckets(elements, {.elements = size}, ranks);
  };
  const int64_t large = 8'030'261'248;
  EXPECT_EQ(warning(large, 1000, 2),
            "warning: ddp.bucket_size=1000 makes 245065 buckets, and each waits for the start of its collectives. Leave it out, "
            "which means 40000000 and makes 201, or give at least 9987888");
  EXPECT_EQ(warning(large, 0, 2), "") << "the default";
  EXPECT_EQ(warning(large, 10'100'000, 2), "") << "four times as many";
  EXPECT_NE(warning(large, 9'000'000, 2), "");
  EXPECT_EQ(warning(large, 1000, 1), "") << "nothing is exchanged";
  EXPECT_EQ(warning(64 * 32768, 1, 2), "") << "few all the same";
  EXPECT_THAT(warning(65 * 32768, 1, 2), testing::HasSubstr("makes 65 buckets"));
}

TEST(BucketExchange, ReductionBeginsWhenABucketIsFinal) {
  OnRanks(2, [](Communicator& world) {
    const auto store = MakeStore(DType::kF32);
    BucketExchange exchange(store.get(), {.elements = 1, .overlap_reduce = true}, false, &world, {});
    const Tensor gradients = store->main_grads();
    std::fill_n(gradients.as<float>(), gradients.size(), static_cast<float>(2 * world.rank() + 2));
    const volatile float* at = gradients.as<float>();
    exchange.GradientsAdded(0);  // Of an earlier microbatch.
    exchange.BeginLastBackward();
    exchange.GradientsAdded(3);
    exchange.GradientsAdded(2);  // It begins in the first bucket: the second one is final.
    const auto is_mean = [at] {  // Of the whole bucket: its elements do not arrive in order.
      int64_t i = 32768;
      while (i < 45856 && at[i] == 3.0f) ++i;
      return i == 45856;
    };
    for (int i = 0; i < 20000 && !is_mean(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(is_mean());
    EXPECT_EQ(at[32767], static_cast<float>(2 * world.rank() + 2));
    exchange.GradientsAdded(1);
    exchange.GradientsAdded(0);
    exchange.FinishReduction();
    EXPECT_EQ(at[0], 3.0f);
    EXPECT_EQ(at[32767], 3.0f);
    EXPECT_EQ(at[45855], 3.0f);
  });
}

TEST(BucketExchange, ALostPeerIsAnErrorOfTheTrainingThread) {
  OnRanks(2, [](Communicator& world) {
    const auto store = MakeStore(DType::kF32);
    BucketExchange exchange(store.get(), {.elements = 1, .overlap_reduce = true}, false, &world, {});
    world.Barrier();
    if (world.rank() == 1) return;
    exchange.BeginLastBackward();
    try {
      exchange.GradientsAdded(0);
      exchange.FinishReduction();
      ADD_FAILURE() << "no error";
    } catch (const EngineError& error) {
      EXPECT_EQ(error.reason(), v1::REASON_PEER_LOST) << error.what();
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 0 of 2"));
    }
  });
}

// Two tensor-parallel ranks: the partial gradient is added up, the norm counts shards on both and the rest once.
TEST(Optimizer, TensorParallelNormCountsEveryParameterOnce) {
  OnRanks(2, [](Communicator& tensor) {
    const auto self = MakeSelfCommunicator();
    ParameterStore store(DType::kF32, DeviceType::kCpu);
    store.Add({.name = "shard", .shape = {2, 2}, .global_shape = {4, 2}, .shard_axis = 0, .shard_begin = 2 * tensor.rank()});
    store.Add({.name = "whole", .shape = {3}, .global_shape = {3}});
    store.Add({.name = "partial", .shape = {3}, .global_shape = {3}, .partial_gradient = true});
    store.Allocate();
    OptimizerOptions options;
    options.count_zero_gradients = true;
    Optimizer optimizer(&store, options, self.get(), &tensor);
    std::fill_n(store[0].main_grad.as<float>(), 3, static_cast<float>(tensor.rank() + 1));  // The fourth is zero.
    std::fill_n(store[1].main_grad.as<float>(), 2, 2.0f);                                   // The third is zero.
    std::fill_n(store[2].main_grad.as<float>(), 3, static_cast<float>(3 * tensor.rank() + 1));
    optimizer.ReduceGradients();
    EXPECT_EQ(store[2].main_grad.as<float>()[2], 5.0f);
    EXPECT_EQ(store[1].main_grad.as<float>()[0], 2.0f);
    const StepResult result = optimizer.Step(1e-3, 0.0);
    EXPECT_NEAR(result.gradient_norm, std::sqrt(3.0 * 1 + 3.0 * 4 + 2.0 * 4 + 3.0 * 25), 1e-5);
    EXPECT_EQ(result.zero_gradients, 3);
    for (const OptimizerStateTensor& state : optimizer.StateTensors()) {
      EXPECT_EQ(state.write_here, tensor.rank() == 0 || state.spec->name == "shard") << state.name;
    }
    if (tensor.rank() == 1) store[0].main_grad.as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(optimizer.MeasureGradients().norm));
    EXPECT_EQ(optimizer.FindNonFiniteGradient(), tensor.rank() == 1 ? "shard" : "") << "each rank looks at its own";
  });
}

}  // namespace
}  // namespace mbridge
