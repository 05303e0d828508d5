#include "engine/ops/cuda/twin_test.h"
#include "engine/ops/loss_sum.h"
#include "engine/ops/softmax_cross_entropy.h"
#include "engine/ops/vocab_cross_entropy.h"

namespace mbridge::test {
namespace {

// loss and, where weights are given, the gradient of one row in double precision.
double ReferenceLoss(const double* z, int64_t n, int64_t label, double weight, double* gradient) {
  const double largest = *std::max_element(z, z + n);
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += std::exp(z[j] - largest);
  for (int64_t j = 0; j < n; ++j) gradient[j] = (std::exp(z[j] - largest) / sum - (j == label ? 1.0 : 0.0)) * weight;
  return std::log(sum) - (z[label] - largest);
}

void CheckSoftmax(const Gpu& gpu, DType dtype, int64_t rows, int64_t n) {
  SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << n);
  const Values logits = RandomValues(rows * n, 1, 8.0, dtype), weights = RandomValues(rows, 2, 1.0, DType::kF32);
  Values labels = RandomInts(rows, 3, static_cast<int>(n)), losses(rows), gradients(rows * n);
  labels[0] = 0;
  labels[rows - 1] = static_cast<double>(n - 1);
  for (int64_t i = 0; i < rows; ++i) {
    losses[i] = ReferenceLoss(logits.data() + i * n, n, static_cast<int64_t>(labels[i]), weights[i], gradients.data() + i * n);
  }
  const OnGpu z(dtype, {rows, n}, logits), label(DType::kI32, {rows}, labels), weight(DType::kF32, {rows}, weights);
  const OnGpu loss(DType::kF32, {rows});
  SoftmaxCrossEntropy(gpu, z, label, {}, dtype, loss);
  ExpectNear(loss.ToValues(), losses, 2e-6, 2e-6);
  EXPECT_EQ(z.ToValues(), logits);
  MB_CUDA(cudaMemset(loss.tensor().data, 0xff, loss.tensor().bytes()));
  SoftmaxCrossEntropy(gpu, z, label, weight, dtype, loss);
  ExpectNear(loss.ToValues(), losses, 2e-6, 2e-6);
  ExpectNear(z.ToValues(), gradients, dtype == DType::kF32 ? 1e-5 : 0.6 * StepOf(dtype), 1e-7);
}

TEST(SoftmaxCrossEntropyCuda, MatchesADoubleReference) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t n : {1, 7, 15, 16, 50, 1000, 4099, 50257}) CheckSoftmax(gpu, dtype, 3, n);
  }
  CheckSoftmax(gpu, DType::kBF16, 257, 33);
}

TEST(SoftmaxCrossEntropyCuda, SmallRows) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t n : {1, 9, 33, 520}) CheckSoftmax(gpu, dtype, 2, n);
  }
  CheckSoftmax(gpu, DType::kBF16, 2, 8192);
}

// One to eight blocks of a cluster for a row, the last of them with less than the others or nothing.
TEST(SoftmaxCrossEntropyCuda, ClustersShareARow) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const int64_t n : {8192, 8200, 37992, 38008, 50304, 76008, 151936, 200064, 304000}) CheckSoftmax(gpu, DType::kBF16, 3, n);
  CheckSoftmax(gpu, DType::kF16, 2, 128256);
}

// Clusters that come to a second and a third row.
TEST(SoftmaxCrossEntropyCuda, ClustersWalkOverRows) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  CheckSoftmax(gpu, DType::kBF16, 900, 8200);
  CheckSoftmax(gpu, DType::kF16, 450, 38008);
  CheckSoftmax(gpu, DType::kBF16, 110, 151936);
}

// More than a multiprocessor's shared memory holds.
TEST(SoftmaxCrossEntropyCuda, TakesVeryWideRows) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  CheckSoftmax(gpu, DType::kBF16, 2, 128256);
  CheckSoftmax(gpu, DType::kF32, 1, 128257);
}

TEST(VocabCrossEntropyCudaSmall, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kRows = 5, kColumns = 1003, kTile = 608;
  for (const DType precision : kGpuTypes) {
    for (const DType storage : {precision, DType::kF32}) {
      SCOPED_TRACE(testing::Message() << NameOf(storage) << " rounded to " << NameOf(precision));
      const Twin labels(DType::kI32, {kRows}, Values{0, 607, 608, 1002, 33});
      const Owned cpu_labels(DType::kI32, {kRows}, Values{0, 607, 608, 1002, 33});
      const auto vector = [] { return Owned(DType::kF32, {kRows}); };
      const Owned maximum = vector(), sum = vector(), predicted = vector(), loss = vector();
      const OnGpu gpu_maximum(maximum), gpu_sum(sum), gpu_predicted(predicted), gpu_loss(loss);
      const CrossEntropyState state{maximum, sum, predicted}, gpu_state{gpu_maximum, gpu_sum, gpu_predicted};
      const Owned kept(precision, {kRows, kColumns});
      const OnGpu gpu_kept(precision, {kRows, kColumns});
      CrossEntropyBegin.cpu({}, state);
      CrossEntropyBegin(gpu, gpu_state);
      for (int64_t first = 0; first < kColumns; first += kTile) {
        const int64_t n = std::min(kTile, kColumns - first);
        const Values tile = RandomValues(kRows * kTile, static_cast<uint32_t>(first + 1), 8.0, storage);
        CrossEntropyFold.cpu({}, Owned(DType::kF32, {kRows, kTile}, tile), first, n, cpu_labels, precision, state, kept);
        CrossEntropyFold(gpu, OnGpu(storage, {kRows, kTile}, tile), first, n, labels.gpu, precision, gpu_state, gpu_kept);
        gpu.Synchronize();
      }
      Values above = maximum.ToValues();
      above[1] += 2.5;
      const Twin largest(DType::kF32, {kRows}, above);
      CrossEntropyRescale.cpu({}, state, largest.cpu);
      CrossEntropyRescale(gpu, gpu_state, largest.gpu);
      CrossEntropyLoss.cpu({}, state, loss);
      CrossEntropyLoss(gpu, gpu_state, gpu_loss);
      EXPECT_EQ(gpu_kept.ToValues(), kept.ToValues());
      EXPECT_EQ(gpu_maximum.ToValues(), maximum.ToValues());
      EXPECT_EQ(gpu_predicted.ToValues(), predicted.ToValues());
      ExpectNear(gpu_loss.ToValues(), loss.ToValues(), 2e-6, 2e-6);
      const Twin weight(DType::kF32, {kRows}, 9);
      for (int64_t first = 0; first < kColumns; first += kTile) {
        const int64_t n = std::min(kTile, kColumns - first);
        const Owned tile(DType::kF32, {kRows, kTile});
        const OnGpu gpu_tile(storage, {kRows, kTile}, Values(kRows * kTile, 0.0));
        CrossEntropyGradient.cpu({}, kept, first, n, cpu_labels, weight.cpu, state, precision, tile);
        CrossEntropyGradient(gpu, gpu_kept, first, n, labels.gpu, weight.gpu, gpu_state, precision, gpu_tile);
        ExpectWithinAStep(gpu_tile.ToValues(), tile.ToValues(), precision, 1e-7);
      }
    }
  }
}

TEST(LossSumCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const auto& [b, s] : {RowShape{1, 1}, RowShape{3, 37}, RowShape{4, 2048}}) {
    const int64_t count = b * s;
    const Owned labels(DType::kI32, {b, s}, RandomInts(count, 1, 50000)), labels_out(DType::kI32, {count});
    const Twin mask(DType::kF32, {b, s}, RandomInts(count, 2, 2)), loss(DType::kF32, {s, b}, 3, 5.0);
    const Owned weight(DType::kF32, {count});
    const OnGpu gpu_labels_out(DType::kI32, {count}), gpu_weight(DType::kF32, {count}), gpu_labels(labels);
    SetTargets.cpu({}, labels, mask.cpu, 0.125f, labels_out, weight);
    SetTargets(gpu, gpu_labels, mask.gpu, 0.125f, gpu_labels_out, gpu_weight);
    EXPECT_EQ(gpu_labels_out.ToValues(), labels_out.ToValues());
    EXPECT_EQ(gpu_weight.ToValues(), weight.ToValues());

    double totals[2] = {1.5, 2}, gpu_totals[2];
    const Tensor expected{totals, DType::kF64, DeviceType::kCpu, {2}};
    const OnGpu actual(DType::kF64, {2});
    MB_CUDA(cudaMemcpy(actual.tensor().data, totals, sizeof(totals), cudaMemcpyHostToDevice));
    AddLossSums.cpu({}, loss.cpu, mask.cpu, expected);
    AddLossSums(gpu, loss.gpu, mask.gpu, actual);
    gpu.Synchronize();
    MB_CUDA(cudaMemcpy(gpu_totals, actual.tensor().data, sizeof(totals), cudaMemcpyDeviceToHost));
    EXPECT_EQ(gpu_totals[0], totals[0]);
    EXPECT_EQ(gpu_totals[1], totals[1]);
  }
}

}  // namespace
}  // namespace mbridge::test
