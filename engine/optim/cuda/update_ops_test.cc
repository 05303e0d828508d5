#include "engine/optim/update_ops.h"

#include <cstring>
#include <limits>

#include "engine/ops/cuda/twin_test.h"
#include "engine/optim/optimizer.h"

namespace mbridge::test {
namespace {

// Pieces that are whole vectors, that are not, and single elements; gaps between them; one begins unaligned.
const std::vector<UpdatePiece>& Pieces() {
  static const auto* pieces =
      new std::vector<UpdatePiece>{{64, 16384, 1}, {16448, 7, 0}, {16480, 1, 1}, {16513, 4001, 0}, {20544, 2048, 1}};
  return *pieces;
}
constexpr int64_t kOrigin = 64, kEnd = 22592;

class GpuPieces {
 public:
  GpuPieces() : memory_(DType::kU8, {static_cast<int64_t>(Pieces().size() * sizeof(UpdatePiece))}) {
    MB_CUDA(cudaMemcpy(memory_.tensor().data, Pieces().data(), Pieces().size() * sizeof(UpdatePiece), cudaMemcpyHostToDevice));
  }
  PieceList list() const {
    return {static_cast<const UpdatePiece*>(memory_.tensor().data), static_cast<int64_t>(Pieces().size())};
  }

 private:
  OnGpu memory_;
};

template <class T> std::vector<T> HostCopy(const Tensor& tensor) {
  MB_CUDA(cudaDeviceSynchronize());
  std::vector<T> values(static_cast<size_t>(tensor.size()));
  MB_CUDA(cudaMemcpy(values.data(), tensor.data, tensor.bytes(), cudaMemcpyDeviceToHost));
  return values;
}

TEST(UpdateOpsCudaSmall, SumsMatchTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const GpuPieces pieces;
  const PieceList list{Pieces().data(), static_cast<int64_t>(Pieces().size())};
  Values values = RandomValues(kEnd - kOrigin, 1, 1.0, DType::kF32);
  for (size_t i = 0; i < values.size(); i += 11) values[i] = 0;
  const Owned data(DType::kF32, {kEnd - kOrigin}, values);
  const OnGpu gpu_data(data), gpu_sums(DType::kF64, {list.count}), gpu_totals(DType::kF64, {2}), gpu_zeros(DType::kI64, {1});
  std::vector<double> sums(Pieces().size());
  const Tensor cpu_sums{sums.data(), DType::kF64, DeviceType::kCpu, {list.count}};
  SumOfSquares.cpu({}, data, kOrigin, list, 0.37f, cpu_sums);
  SumOfSquares(gpu, gpu_data, kOrigin, pieces.list(), 0.37f, gpu_sums);
  const std::vector<double> actual = HostCopy<double>(gpu_sums);
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(actual[i], sums[i], 1e-12 * sums[i]) << i;

  const OnGpu firsts(DType::kI64, {3});
  const int64_t first_pieces[] = {0, 2, 5};
  MB_CUDA(cudaMemcpy(firsts.tensor().data, first_pieces, sizeof(first_pieces), cudaMemcpyHostToDevice));
  SumByParameter(gpu, gpu_sums, firsts, gpu_totals);
  const std::vector<double> totals = HostCopy<double>(gpu_totals);
  EXPECT_NEAR(totals[0], sums[0] + sums[1], 1e-12 * totals[0]);
  EXPECT_NEAR(totals[1], sums[2] + sums[3] + sums[4], 1e-12 * totals[1]);

  int64_t zeros = 0;
  CountZeros.cpu({}, data, kOrigin, list, {&zeros, DType::kI64, DeviceType::kCpu, {1}});
  CountZeros(gpu, gpu_data, kOrigin, pieces.list(), gpu_zeros);
  EXPECT_GT(zeros, 1000);
  EXPECT_EQ(HostCopy<int64_t>(gpu_zeros)[0], zeros);
}

TEST(UpdateOpsCudaSmall, TheUpdateEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const GpuPieces pieces;
  const PieceList list{Pieces().data(), static_cast<int64_t>(Pieces().size())};
  constexpr int64_t kCount = kEnd - kOrigin;
  Values second = RandomValues(kCount, 3, 1.0, DType::kF32);
  for (double& x : second) x = std::fabs(x);
  for (const DType dtype : kGpuTypes) {
    for (const AdamOptions& adam : {AdamOptions{}, AdamOptions{.beta1 = 0.3, .beta2 = 0.5, .eps = 1e-3},
                                    AdamOptions{.beta2 = 0.95, .decoupled_weight_decay = false}}) {
      const AdamFactors decay = MakeAdamFactors(adam, 3, 3e-4, 0.1, 0.5f, 0.7f),
                        no_decay = MakeAdamFactors(adam, 3, 3e-4, 0, 0.5f, 0.7f);
      const Owned gradient(DType::kF32, {kEnd}, RandomValues(kEnd, 1, 1.0, DType::kF32));
      const Owned first(DType::kF32, {kCount}, RandomValues(kCount, 2, 1.0, DType::kF32)), moment(DType::kF32, {kCount}, second);
      const Owned master(DType::kF32, {kCount}, RandomValues(kCount, 4, 1.0, DType::kF32));
      const Owned value(dtype, {kEnd}, Values(kEnd, 0.0));
      const OnGpu gpu_gradient(gradient), gpu_first(first), gpu_moment(moment), gpu_master(master), gpu_value(value);
      const bool separate = dtype != DType::kF32;
      UpdatePieces.cpu({}, {gradient, first, moment, master, separate ? value.tensor() : Tensor(), {}, kOrigin}, list, decay,
                       no_decay);
      UpdatePieces(gpu, {gpu_gradient, gpu_first, gpu_moment, gpu_master, separate ? gpu_value.tensor() : Tensor(), {}, kOrigin},
                   pieces.list(), decay, no_decay);
      EXPECT_EQ(gpu_first.ToValues(), first.ToValues());
      EXPECT_EQ(gpu_moment.ToValues(), moment.ToValues());
      EXPECT_EQ(gpu_master.ToValues(), master.ToValues());
      EXPECT_EQ(gpu_value.ToValues(), value.ToValues());
    }
  }
}

TEST(UpdateOpsCudaSmall, NarrowStateEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const GpuPieces pieces;
  const PieceList list{Pieces().data(), static_cast<int64_t>(Pieces().size())};
  constexpr int64_t kCount = kEnd - kOrigin;
  const AdamFactors factors = MakeAdamFactors({.beta2 = 0.95}, 3, 3e-4, 0.1, 0.5f, 0.7f);
  const Owned gradient(DType::kF32, {kEnd}, RandomValues(kEnd, 1, 1.0, DType::kF32));
  const OnGpu gpu_gradient(gradient);
  for (const DType moments : {DType::kF32, DType::kBF16}) {
    for (const bool split : {false, true}) {
      const Owned first(moments, {kCount}, RandomValues(kCount, 2)), second(moments, {kCount}, Values(kCount, 0.25));
      const Owned master(DType::kF32, {kCount}, RandomValues(kCount, 3, 1.0, DType::kF32));
      const Owned value(DType::kBF16, {kEnd}, RandomValues(kEnd, 4)), remainder(DType::kBF16, {kCount}, RandomValues(kCount, 5));
      const OnGpu gpu_first(first), gpu_second(second), gpu_master(master), gpu_value(value), gpu_remainder(remainder);
      UpdatePieces.cpu(
          {},
          {gradient, first, second, split ? Tensor() : master.tensor(), value, split ? remainder.tensor() : Tensor(), kOrigin},
          list, factors, factors);
      UpdatePieces(gpu,
                   {gpu_gradient, gpu_first, gpu_second, split ? Tensor() : gpu_master.tensor(), gpu_value,
                    split ? gpu_remainder.tensor() : Tensor(), kOrigin},
                   pieces.list(), factors, factors);
      EXPECT_EQ(gpu_first.ToValues(), first.ToValues());
      EXPECT_EQ(gpu_second.ToValues(), second.ToValues());
      EXPECT_EQ(gpu_master.ToValues(), master.ToValues());
      EXPECT_EQ(gpu_value.ToValues(), value.ToValues());
      // As bits: a remainder may look like NaN.
      const std::vector<BFloat16> bits = HostCopy<BFloat16>(gpu_remainder);
      EXPECT_EQ(std::memcmp(bits.data(), remainder.tensor().data, remainder.tensor().bytes()), 0);
    }
  }
}

std::unique_ptr<ParameterStore> MakeStore(DType dtype, DeviceType device) {
  auto store = std::make_unique<ParameterStore>(dtype, device);
  for (const ParameterSpec& spec : {ParameterSpec{.name = "embedding", .shape = {97, 300}, .global_shape = {97, 300}},
                                    ParameterSpec{.name = "norm", .shape = {301}, .global_shape = {301}, .weight_decay = false},
                                    ParameterSpec{.name = "linear", .shape = {128, 128}, .global_shape = {128, 128}}}) {
    store->Add(spec);
  }
  store->Allocate();
  return store;
}

void Fill(const Tensor& tensor, uint32_t seed, double scale) {
  const Owned values(tensor.dtype, tensor.shape, RandomValues(tensor.size(), seed, scale, tensor.dtype));
  const cudaMemcpyKind kind = tensor.device == DeviceType::kCuda ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost;
  MB_CUDA(cudaMemcpy(tensor.data, values.tensor().data, tensor.bytes(), kind));
}

TEST(OptimizerCuda, StepsAsOnTheCpu) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const auto self = MakeSelfCommunicator();
  OptimizerOptions options;
  options.clip_grad = 0;
  options.count_zero_gradients = true;
  for (const DType dtype : kGpuTypes) {
    const auto cpu_store = MakeStore(dtype, DeviceType::kCpu), gpu_store = MakeStore(dtype, DeviceType::kCuda);
    for (const auto& store : {cpu_store.get(), gpu_store.get()}) {
      for (const Parameter& parameter : store->parameters()) Fill(parameter.value, 1, 0.1);
    }
    Optimizer cpu(cpu_store.get(), options, self.get()), cuda(gpu_store.get(), options, self.get(), nullptr, gpu);
    for (uint32_t step = 0; step < 3; ++step) {
      for (const auto& store : {cpu_store.get(), gpu_store.get()}) {
        for (const Parameter& parameter : store->parameters()) Fill(parameter.main_grad, 10 + step, 1.0);
      }
      const StepResult expected = cpu.Step(1e-2, 0.1), result = cuda.Step(1e-2, 0.1);
      EXPECT_TRUE(result.updated);
      EXPECT_NEAR(result.gradient_norm, expected.gradient_norm, 1e-6 * expected.gradient_norm);
      EXPECT_EQ(result.zero_gradients, expected.zero_gradients);
    }
    gpu.Synchronize();
    std::vector<char> values(gpu_store->values().bytes());
    MB_CUDA(cudaMemcpy(values.data(), gpu_store->values().data, values.size(), cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(values.data(), cpu_store->values().data, values.size()), 0) << NameOf(dtype);
    EXPECT_NEAR(cuda.ParameterNorm(), cpu.ParameterNorm(), 1e-6 * cpu.ParameterNorm());
    EXPECT_EQ(cuda.FindNonFiniteGradient(), "");
    const float infinity = std::numeric_limits<float>::infinity();
    MB_CUDA(cudaMemcpy(gpu_store->parameters()[1].main_grad.as<float>() + 300, &infinity, sizeof(float), cudaMemcpyHostToDevice));
    EXPECT_FALSE(cuda.Step(1e-2, 0.1).updated);
    EXPECT_EQ(cuda.FindNonFiniteGradient(), "norm");
  }
}

}  // namespace
}  // namespace mbridge::test
