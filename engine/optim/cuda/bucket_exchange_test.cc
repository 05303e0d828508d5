// The order between the compute stream and the stream of the traffic, on a GPU; without one the test is skipped.
#include "engine/optim/bucket_exchange.h"

#include <cuda_runtime.h>

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "engine/core/device.h"
#include "engine/ops/scale.h"

namespace mbridge {
namespace {

// Rank 0 of two whose peer has the same numbers.
class Mirror : public Communicator {
 public:
  explicit Mirror(const Context& context) : context_(context) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void AllReduce(const Tensor& tensor, ReduceOp) override { Double(tensor); }
  void ReduceScatter(const Tensor&, const Tensor& output) override { Double(output); }
  // The peer's half gets this rank's values.
  void AllGather(const Tensor& input, const Tensor& output) override {
    DeviceOf(context_.device).CopyOnDevice(context_, output.Rows(input.size(), input.size()).data, input.data, input.bytes());
  }
  void Broadcast(const Tensor&, int) override {}
  void Barrier() override {}
  std::unique_ptr<Communicator> Split(const std::vector<int>&, const std::string&) override { return nullptr; }
  std::unique_ptr<Communicator> Twin(const Context& context) override { return std::make_unique<Mirror>(context); }

 private:
  void Double(const Tensor& tensor) const { Scale(context_, tensor, 2.0f, DType::kF32, tensor); }

  const Context context_;
};

// Gradients that a queue of slow passes writes, then values that others write: all before the traffic may touch them.
std::vector<float> Exchanged(const Context& context, bool sharded, bool overlap) {
  constexpr int64_t kParameters = 8, kSize = 1 << 20;
  Device& device = DeviceOf(DeviceType::kCuda);
  ParameterStore store(DType::kF32, DeviceType::kCuda);
  for (int64_t i = 0; i < kParameters; ++i) {
    store.Add({.name = std::to_string(i), .shape = {kSize}, .global_shape = {kSize}});
  }
  store.Allocate(2 * BucketExchange::kBlock);
  Mirror mirror(context);
  BucketExchange exchange(&store, {.elements = kSize + 1, .overlap_reduce = overlap, .overlap_gather = overlap}, sharded, &mirror,
                          context);
  std::vector<float> host(static_cast<size_t>(kParameters * kSize));
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i % 8191) + 1.0f;
  const size_t bytes = host.size() * sizeof(float);
  for (const Tensor& buffer : {store.main_grads(), store.values()}) device.CopyToDevice(context, buffer.data, host.data(), bytes);
  for (int step = 0; step < 3; ++step) {
    exchange.BeginLastBackward();
    for (int p = kParameters; p-- > 0;) {
      for (int pass = 0; pass < 100; ++pass) Scale(context, store[p].main_grad, 0.999f, DType::kF32, store[p].main_grad);
      exchange.GradientsAdded(p);
    }
    exchange.FinishReduction();
    for (int i = 0; sharded && i < exchange.count(); ++i) {
      const BucketExchange::Range own = exchange.own(i);
      const Tensor part = store.values().Rows(own.begin, own.end - own.begin);
      for (int pass = 0; pass < 100; ++pass) Scale(context, part, 0.998f, DType::kF32, part);
      exchange.StartGather(i);
    }
    for (int p = 0; p < kParameters; ++p) {
      exchange.BeforeUse(p + 1);
      Scale(context, store[p].value, 1.5f, DType::kF32, store[p].value);
    }
  }
  std::vector<float> result(2 * host.size());
  device.CopyToHost(context, result.data(), store.main_grads().data, bytes);
  device.CopyToHost(context, result.data() + host.size(), store.values().data, bytes);
  device.Synchronize(context);
  return result;
}

TEST(BucketExchangeCuda, StreamsWaitForEachOther) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  const Context context = DeviceOf(DeviceType::kCuda).MakeContext(size_t{1} << 20);
  for (const bool sharded : {false, true}) {
    const std::vector<float> apart = Exchanged(context, sharded, false), beside = Exchanged(context, sharded, true);
    EXPECT_EQ(std::memcmp(apart.data(), beside.data(), apart.size() * sizeof(float)), 0) << sharded;
    EXPECT_NE(apart[0], 1.0f);
  }
}

}  // namespace
}  // namespace mbridge
