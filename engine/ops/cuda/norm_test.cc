#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "engine/ops/cuda/twin_test.h"
#include "engine/ops/dropout.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/layer_norm.h"
#include "engine/ops/rms_norm.h"

namespace mbridge::test {
namespace {

// A warp a row (up to 1024 columns of 16 bits), one and two vectors a thread, shared memory next to 48 KiB (before more has been
// allowed), more columns than registers hold, odd widths; numbers of rows next to one and two a multiprocessor.
// Gemma's rule, so that the offset is seen.
NormOptions OptionsFor(DType dtype) { return {.epsilon = 1e-5f, .gamma_offset = 1.0f, .precision = dtype}; }

constexpr RowShape kShapes[] = {{1, 1},      {3, 7},     {9, 96},     {3000, 256}, {2500, 768}, {5, 1024}, {5, 1032},
                                {700, 2048}, {9, 3072},  {5, 4096},   {4, 4104},   {3, 8192},   {2, 8200}, {3, 12288},
                                {2, 16384},  {2, 33000}, {65, 1001},  {1, 2048},   {2, 2048},   {3, 2048}, {133, 2048},
                                {265, 2048}, {1, 8192},  {133, 8192}, {265, 4104}};
constexpr RowShape kSmallShapes[] = {{1, 1},    {3, 7},    {9, 96},   {17, 768}, {3, 1032},
                                     {3, 2048}, {2, 4104}, {2, 8200}, {1, 1032}, {133, 1032}};

void CheckLayerNormForward(const Gpu& gpu, std::span<const RowShape> shapes) {
  for (const DType dtype : kGpuTypes) {
    const NormOptions options = OptionsFor(dtype);
    for (const auto& [rows, h] : shapes) {
      const Twin x(dtype, {rows, h}, 1), gamma(dtype, {h}, 2), beta(dtype, {h}, 3);
      const Owned y(DType::kF32, {rows, h}), mean(DType::kF32, {rows}), rstd(DType::kF32, {rows});
      const OnGpu gpu_y(dtype, {rows, h}), gpu_mean(DType::kF32, {rows}), gpu_rstd(DType::kF32, {rows});
      LayerNormForward.cpu({}, x.cpu, gamma.cpu, beta.cpu, options, y, mean, rstd);
      LayerNormForward(gpu, x.gpu, gamma.gpu, beta.gpu, options, gpu_y, gpu_mean, gpu_rstd);
      SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << h);
      ExpectNear(gpu_mean.ToValues(), mean.ToValues(), 1e-5, 1e-6);
      ExpectNear(gpu_rstd.ToValues(), rstd.ToValues(), 1e-5, 0);
      ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, 3e-6);
    }
  }
}

TEST(LayerNormCuda, ForwardMatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  CheckLayerNormForward(Gpu(), kShapes);
}
TEST(LayerNormCuda, SmallForward) {
  MB_NEEDS_GPU();
  CheckLayerNormForward(Gpu(), kSmallShapes);
}

void CheckLayerNormBackward(const Gpu& gpu, std::span<const RowShape> shapes) {
  for (const DType dtype : kGpuTypes) {
    const NormOptions options = OptionsFor(dtype);
    for (const auto& [rows, h] : shapes) {
      for (const bool has_residual : {false, true}) {
        SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << h);
        const Twin x(dtype, {rows, h}, 1), gamma(dtype, {h}, 2), dy(dtype, {rows, h}, 3), residual(dtype, {rows, h}, 4);
        const Twin mean(DType::kF32, {rows}, 5, 0.1), rstd(DType::kF32, {rows}, Values(rows, 1.7));
        const Twin gamma_grad(DType::kF32, {h}, 6), beta_grad(DType::kF32, {h}, 7);
        LayerNormBackward.cpu({}, dy.cpu, x.cpu, gamma.cpu, mean.cpu, rstd.cpu, has_residual ? residual.cpu.tensor() : Tensor(),
                              options, dy.cpu, gamma_grad.cpu, beta_grad.cpu);
        LayerNormBackward(gpu, dy.gpu, x.gpu, gamma.gpu, mean.gpu, rstd.gpu, has_residual ? residual.gpu.tensor() : Tensor(),
                          options, dy.gpu, gamma_grad.gpu, beta_grad.gpu);
        ExpectWithinAStep(dy.gpu.ToValues(), dy.cpu.ToValues(), dtype, 4 * StepOf(dtype));
        ExpectWithinAStep(gamma_grad.gpu.ToValues(), gamma_grad.cpu.ToValues(), dtype, StepOf(dtype) + 1e-6 * rows, 1.0);
        ExpectWithinAStep(beta_grad.gpu.ToValues(), beta_grad.cpu.ToValues(), dtype, StepOf(dtype) + 1e-6 * rows, 1.0);
      }
    }
  }
}

TEST(LayerNormCuda, BackwardMatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  CheckLayerNormBackward(Gpu(), kShapes);
}
TEST(LayerNormCuda, SmallBackward) {
  MB_NEEDS_GPU();
  CheckLayerNormBackward(Gpu(), kSmallShapes);
}

// In double precision: the CPU twin's F32 sums over wide rows are less exact than the GPU's.
Values ExactRstd(const Values& x, int64_t rows, int64_t h, double epsilon) {
  Values exact(rows);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t j = 0; j < h; ++j) squares += x[row * h + j] * x[row * h + j];
    exact[row] = 1.0 / std::sqrt(squares / static_cast<double>(h) + epsilon);
  }
  return exact;
}

void CheckRmsNormForward(const Gpu& gpu, std::span<const RowShape> shapes) {
  for (const DType dtype : kGpuTypes) {
    const NormOptions options = OptionsFor(dtype);
    for (const auto& [rows, h] : shapes) {
      SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << h);
      const Twin x(dtype, {rows, h}, 1), gamma(dtype, {h}, 2);
      const Owned y(DType::kF32, {rows, h}), rstd(DType::kF32, {rows});
      const OnGpu gpu_y(dtype, {rows, h}), gpu_rstd(DType::kF32, {rows});
      RmsNormForward.cpu({}, x.cpu, gamma.cpu, options, y, rstd);
      RmsNormForward(gpu, x.gpu, gamma.gpu, options, gpu_y, gpu_rstd);
      ExpectNear(gpu_rstd.ToValues(), ExactRstd(x.cpu.ToValues(), rows, h, options.epsilon), 2e-6, 0);
      ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, 1e-6);
    }
  }
}

TEST(RmsNormCuda, ForwardMatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  CheckRmsNormForward(Gpu(), kShapes);
}
TEST(RmsNormCuda, SmallForward) {
  MB_NEEDS_GPU();
  CheckRmsNormForward(Gpu(), kSmallShapes);
}

void CheckRmsNormBackward(const Gpu& gpu, std::span<const RowShape> shapes) {
  for (const DType dtype : kGpuTypes) {
    const NormOptions options = OptionsFor(dtype);
    for (const auto& [rows, h] : shapes) {
      for (const bool has_residual : {false, true}) {
        SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << h);
        const Twin x(dtype, {rows, h}, 1), gamma(dtype, {h}, 2), dy(dtype, {rows, h}, 3), residual(dtype, {rows, h}, 4);
        const Twin rstd(DType::kF32, {rows}, Values(rows, 1.7)), gamma_grad(DType::kF32, {h}, 6);
        const Owned dx(DType::kF32, {rows, h});
        RmsNormBackward.cpu({}, dy.cpu, x.cpu, gamma.cpu, rstd.cpu, has_residual ? residual.cpu.tensor() : Tensor(), options, dx,
                            gamma_grad.cpu);
        // In the residual's place where there is one.
        const OnGpu fresh(dtype, {rows, h});
        const Tensor& gpu_dx = has_residual ? residual.gpu.tensor() : fresh.tensor();
        RmsNormBackward(gpu, dy.gpu, x.gpu, gamma.gpu, rstd.gpu, has_residual ? residual.gpu.tensor() : Tensor(), options, gpu_dx,
                        gamma_grad.gpu);
        ExpectWithinAStep(has_residual ? residual.gpu.ToValues() : fresh.ToValues(), dx.ToValues(), dtype, 4 * StepOf(dtype));
        ExpectWithinAStep(gamma_grad.gpu.ToValues(), gamma_grad.cpu.ToValues(), dtype, StepOf(dtype) + 1e-6 * rows, 1.0);
      }
    }
  }
}

TEST(RmsNormCuda, BackwardMatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  CheckRmsNormBackward(Gpu(), kShapes);
}
TEST(RmsNormCuda, SmallBackward) {
  MB_NEEDS_GPU();
  CheckRmsNormBackward(Gpu(), kSmallShapes);
}

TEST(RmsNormCuda, OfASumGivesTheBitsOfAdditionAndNorm) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, h] : {RowShape{3, 7},
                                  {9, 96},
                                  {17, 768},
                                  {5, 1032},
                                  {700, 2048},
                                  {9, 3072},
                                  {140, 6144},
                                  {300, 8192},
                                  {2, 16384},
                                  {2, 40008},
                                  {1, 2048},
                                  {133, 2048},
                                  {265, 4104}}) {
      SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << h);
      const auto random = [&, &rows = rows, &h = h](uint32_t seed) {
        return Owned(dtype, {rows, h}, RandomValues(rows * h, seed, 1.0, dtype));
      };
      const OnGpu x(random(1)), residual(random(2)), gamma(dtype, {h}, RandomValues(h, 3)), sum(dtype, {rows, h}),
          y(dtype, {rows, h});
      const OnGpu fused_y(dtype, {rows, h}), rstd(DType::kF32, {rows}), fused_rstd(DType::kF32, {rows});
      const OnGpu amax(Owned(DType::kF32, {1})), fused_amax(Owned(DType::kF32, {1}));
      NormOptions options = OptionsFor(dtype);
      BiasDropoutAddForward(gpu, x, {}, residual, {}, 0.0, DropoutKind::kCompiled, dtype, sum);
      options.amax = amax;
      RmsNormForward(gpu, sum, gamma, options, y, rstd);
      options.amax = fused_amax;
      AddRmsNormForward(gpu, x, residual, gamma, options, residual, fused_y, fused_rstd);
      EXPECT_EQ(residual.ToValues(), sum.ToValues());
      EXPECT_EQ(fused_rstd.ToValues(), rstd.ToValues());
      EXPECT_EQ(fused_y.ToValues(), y.ToValues());
      EXPECT_EQ(fused_amax.ToValues(), amax.ToValues());
    }
  }
}

std::vector<char> BytesOf(const Tensor& tensor) {
  MB_CUDA(cudaDeviceSynchronize());
  std::vector<char> bytes(tensor.bytes());
  MB_CUDA(cudaMemcpy(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost));
  return bytes;
}

// Rows that repeat every 64 on a block's long way over them: each repetition gives the bits of the first.
TEST(NormCuda, LaterRowsOfABlockEqualItsFirst) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr DType kType = DType::kBF16;
  for (const auto& [rows, h] : {RowShape{4096, 1032}, {6400, 2048}, {1664, 4104}, {832, 8192}, {832, 16384}}) {
    SCOPED_TRACE(testing::Message() << rows << " " << h);
    const auto repeat = [&rows = rows, &h = h](const OnGpu& all, uint32_t seed) {
      const OnGpu first(kType, {64, h}, RandomValues(64 * h, seed, 1.0, kType));
      for (int64_t row = 0; row < rows; row += 64) {
        MB_CUDA(
            cudaMemcpy(all.tensor().Rows(row, 64).data, first.tensor().data, first.tensor().bytes(), cudaMemcpyDeviceToDevice));
      }
      MB_CUDA(cudaDeviceSynchronize());
    };
    const OnGpu x(kType, {rows, h}), dy(kType, {rows, h}), residual(kType, {rows, h}), y(kType, {rows, h});
    repeat(x, 1);
    repeat(dy, 2);
    repeat(residual, 3);
    const OnGpu gamma(kType, {h}, RandomValues(h, 4)), beta(kType, {h}, RandomValues(h, 5));
    const OnGpu mean(DType::kF32, {rows}), rstd(DType::kF32, {rows});
    const OnGpu gamma_grad(DType::kF32, {h}, Values(h, 0.0)), beta_grad(DType::kF32, {h}, Values(h, 0.0));
    const auto expect_repetitions = [&, rows = rows](const char* what, const Tensor& tensor) {
      const std::vector<char> bytes = BytesOf(tensor);
      const size_t period = bytes.size() / rows * 64;
      EXPECT_EQ(std::memcmp(bytes.data(), bytes.data() + period, bytes.size() - period), 0) << what;
    };
    const NormOptions options = OptionsFor(kType);
    RmsNormForward(gpu, x, gamma, options, y, rstd);
    expect_repetitions("y", y);
    expect_repetitions("rstd", rstd);
    RmsNormBackward(gpu, dy, x, gamma, rstd, residual, options, y, gamma_grad);
    expect_repetitions("dx", y);
    LayerNormForward(gpu, x, gamma, beta, options, y, mean, rstd);
    expect_repetitions("layer norm's y", y);
    LayerNormBackward(gpu, dy, x, gamma, mean, rstd, residual, options, y, gamma_grad, beta_grad);
    expect_repetitions("layer norm's dx", y);
  }
}

// However many rows there are: the last block may have one of its own less than the others. Nothing is written behind the last.
TEST(NormCuda, RowsDoNotDependOnTheirNumber) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr DType kType = DType::kBF16;
  constexpr int64_t kMost = 400;
  const NormOptions options = OptionsFor(kType);
  for (const int64_t h : {768, 1032, 2048, 4104, 8192, 16384}) {
    const auto random = [h](uint32_t seed) { return Owned(kType, {kMost, h}, RandomValues(kMost * h, seed, 1.0, kType)); };
    const OnGpu x(random(1)), dy(random(2)), residual(random(3));
    const OnGpu gamma(kType, {h}, RandomValues(h, 4)), beta(kType, {h}, RandomValues(h, 5));
    const OnGpu gamma_grad(DType::kF32, {h}, Values(h, 0.0)), beta_grad(DType::kF32, {h}, Values(h, 0.0));
    // What the operators write, for the first `rows`, and the NaN patterns behind it.
    const auto results_of = [&](int64_t rows) {
      const OnGpu y(kType, {kMost, h}), layer_y(kType, {kMost, h}), dx(kType, {kMost, h}), layer_dx(kType, {kMost, h});
      const OnGpu hidden(kType, {kMost, h}), sum_y(kType, {kMost, h});
      const OnGpu mean(DType::kF32, {kMost}), rstd(DType::kF32, {kMost}), layer_rstd(DType::kF32, {kMost});
      const OnGpu sum_rstd(DType::kF32, {kMost});
      const auto of = [rows](const OnGpu& all) { return all.tensor().Rows(0, rows); };
      RmsNormForward(gpu, of(x), gamma, options, of(y), of(rstd));
      AddRmsNormForward(gpu, of(x), of(residual), gamma, options, of(hidden), of(sum_y), of(sum_rstd));
      RmsNormBackward(gpu, of(dy), of(x), gamma, of(rstd), of(residual), options, of(dx), gamma_grad);
      LayerNormForward(gpu, of(x), gamma, beta, options, of(layer_y), of(mean), of(layer_rstd));
      LayerNormBackward(gpu, of(dy), of(x), gamma, of(mean), of(layer_rstd), of(residual), options, of(layer_dx), gamma_grad,
                        beta_grad);
      std::vector<std::vector<char>> results;
      for (const OnGpu* result : {&y, &layer_y, &dx, &layer_dx, &hidden, &sum_y, &mean, &rstd, &layer_rstd, &sum_rstd}) {
        results.push_back(BytesOf(*result));
      }
      return results;
    };
    const std::vector<std::vector<char>> all = results_of(kMost);
    for (const int64_t rows : {1, 2, 3, 131, 132, 133, 263, 264, 265, 397}) {
      SCOPED_TRACE(testing::Message() << rows << " " << h);
      const std::vector<std::vector<char>> some = results_of(rows);
      for (size_t i = 0; i < some.size(); ++i) {
        const size_t written = some[i].size() / kMost * rows;
        EXPECT_EQ(std::memcmp(some[i].data(), all[i].data(), written), 0) << "result " << i;
        EXPECT_TRUE(
            std::all_of(some[i].begin() + static_cast<int64_t>(written), some[i].end(), [](char c) { return c == '\xff'; }))
            << "result " << i;
      }
    }
  }
}

TEST(RmsNormCuda, GivesTheSameBitsEveryTime) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const OnGpu x(DType::kBF16, {3000, 2048}, RandomValues(3000 * 2048, 1)), gamma(DType::kBF16, {2048}, RandomValues(2048, 2));
  const OnGpu rstd(DType::kF32, {3000}, Values(3000, 1.5)), dx(DType::kBF16, {3000, 2048});
  Values first;
  for (int i = 0; i < 3; ++i) {
    const OnGpu grad(DType::kF32, {2048}, Values(2048, 0.0));
    RmsNormBackward(gpu, x, x, gamma, rstd, {}, OptionsFor(DType::kBF16), dx, grad);
    if (i == 0) first = grad.ToValues();
    EXPECT_EQ(grad.ToValues(), first);
  }
}

void CheckQkNorm(const Gpu& gpu, DType dtype, const QkvLayout& layout, QkNormScope scope, int64_t rows) {
  SCOPED_TRACE(testing::Message() << NameOf(dtype) << " heads of " << layout.head_size);
  const bool per_head = scope == QkNormScope::kHead;
  const int64_t d = layout.head_size, width = layout.width(), kinds = per_head ? layout.heads + layout.groups : 2;
  const int64_t queries = per_head ? d : layout.heads * d, keys = per_head ? d : layout.groups * d;
  const QkNormOptions options{layout, scope, OptionsFor(dtype)};
  const Twin qkv(dtype, {rows, width}, 1), q(dtype, {queries}, 2), k(dtype, {keys}, 3), gradient(dtype, {rows, width}, 4);
  const Owned y(DType::kF32, {rows, width}), rstd(DType::kF32, {rows, kinds});
  const OnGpu gpu_y(dtype, {rows, width}), gpu_rstd(DType::kF32, {rows, kinds});
  QkNormForward.cpu({}, qkv.cpu, q.cpu, k.cpu, options, y, rstd);
  QkNormForward(gpu, qkv.gpu, q.gpu, k.gpu, options, gpu_y, gpu_rstd);
  ExpectNear(gpu_rstd.ToValues(), rstd.ToValues(), 1e-5, 0);
  ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, 1e-6);
  const Twin query_grad(DType::kF32, {queries}, 5), key_grad(DType::kF32, {keys}, 6);
  const OnGpu same_rstd(rstd);
  QkNormBackward.cpu({}, gradient.cpu, qkv.cpu, q.cpu, k.cpu, rstd, options, query_grad.cpu, key_grad.cpu);
  QkNormBackward(gpu, gradient.gpu, qkv.gpu, q.gpu, k.gpu, same_rstd, options, query_grad.gpu, key_grad.gpu);
  ExpectWithinAStep(gradient.gpu.ToValues(), gradient.cpu.ToValues(), dtype, StepOf(dtype));
  ExpectWithinAStep(query_grad.gpu.ToValues(), query_grad.cpu.ToValues(), dtype, StepOf(dtype) + 1e-4, 1.0);
  ExpectWithinAStep(key_grad.gpu.ToValues(), key_grad.cpu.ToValues(), dtype, StepOf(dtype) + 1e-4, 1.0);
}

TEST(QkNormCudaSmall, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const QkvLayout& layout : {QkvLayout{1, 1, 8}, QkvLayout{4, 2, 6}, QkvLayout{8, 2, 64}, QkvLayout{6, 3, 96},
                                    QkvLayout{16, 8, 128}, QkvLayout{2, 1, 256}, QkvLayout{3, 3, 129}, QkvLayout{2, 2, 300}}) {
      for (const int64_t rows : {1, 37}) {
        CheckQkNorm(gpu, dtype, layout, QkNormScope::kHead, rows);
        CheckQkNorm(gpu, dtype, layout, QkNormScope::kProjection, rows);
      }
    }
  }
}

TEST(QkNormCuda, SmallSumsOfSplitProjectionsNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const QkvLayout& layout : {QkvLayout{4, 2, 6}, QkvLayout{8, 2, 64}}) {
      constexpr int64_t kRows = 5;
      const int64_t d = layout.head_size, width = layout.width();
      QkNormOptions options{layout, QkNormScope::kProjection, OptionsFor(dtype)};
      options.ranks = 2;
      QkNormOptions gpu_options = options;
      const Twin qkv(dtype, {kRows, width}, 1), q(dtype, {layout.heads * d}, 2), k(dtype, {layout.groups * d}, 3);
      const Twin gradient(dtype, {kRows, width}, 4), rstd(DType::kF32, {kRows, 2}, 5);
      const Owned sums(DType::kF32, {kRows, 2}), y(DType::kF32, {kRows, width}), own_rstd(DType::kF32, {kRows, 2});
      const OnGpu gpu_sums(DType::kF32, {kRows, 2}), gpu_y(dtype, {kRows, width}), gpu_rstd(DType::kF32, {kRows, 2});
      QkNormSquares.cpu({}, qkv.cpu, options, sums);
      QkNormSquares(gpu, qkv.gpu, options, gpu_sums);
      ExpectNear(gpu_sums.ToValues(), sums.ToValues(), 1e-5, 0);
      options.sums = sums, gpu_options.sums = gpu_sums;
      QkNormForward.cpu({}, qkv.cpu, q.cpu, k.cpu, options, y, own_rstd);
      QkNormForward(gpu, qkv.gpu, q.gpu, k.gpu, gpu_options, gpu_y, gpu_rstd);
      ExpectNear(gpu_rstd.ToValues(), own_rstd.ToValues(), 1e-5, 0);
      ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, 1e-6);
      QkNormDots.cpu({}, gradient.cpu, qkv.cpu, q.cpu, k.cpu, rstd.cpu, options, sums);
      QkNormDots(gpu, gradient.gpu, qkv.gpu, q.gpu, k.gpu, rstd.gpu, gpu_options, gpu_sums);
      ExpectNear(gpu_sums.ToValues(), sums.ToValues(), 1e-5, 1e-4);
      const Twin query_grad(DType::kF32, {layout.heads * d}, 6), key_grad(DType::kF32, {layout.groups * d}, 7);
      QkNormBackward.cpu({}, gradient.cpu, qkv.cpu, q.cpu, k.cpu, rstd.cpu, options, query_grad.cpu, key_grad.cpu);
      QkNormBackward(gpu, gradient.gpu, qkv.gpu, q.gpu, k.gpu, rstd.gpu, gpu_options, query_grad.gpu, key_grad.gpu);
      ExpectWithinAStep(gradient.gpu.ToValues(), gradient.cpu.ToValues(), dtype, StepOf(dtype));
      EXPECT_THROW(QkNormSquares(gpu, qkv.gpu, {layout, QkNormScope::kHead, OptionsFor(dtype)}, gpu_sums), EngineError);
    }
  }
}

TEST(GradientSumsCudaSmall, AddGradientEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType precision : kGpuTypes) {
    for (const int64_t count : {1, 1023, 2048, 100003}) {
      const Values unrounded = RandomValues(count, 1, 1.0, DType::kF32);
      const Twin wide(DType::kF32, {count}, unrounded), narrow(precision, {count}, 2), sum(DType::kF32, {count}, 3);
      AddGradient.cpu({}, wide.cpu, precision, sum.cpu);
      AddGradient(gpu, wide.gpu, precision, sum.gpu);
      AddGradient.cpu({}, narrow.cpu, precision, sum.cpu);
      AddGradient(gpu, narrow.gpu, precision, sum.gpu);
      EXPECT_EQ(sum.gpu.ToValues(), sum.cpu.ToValues()) << NameOf(precision) << " " << count;
    }
  }
}

void CheckColumnSums(const Gpu& gpu, std::initializer_list<RowShape> shapes) {
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : shapes) {
      SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << n);
      const Values x = RandomValues(rows * n, 1, 1.0, dtype);
      Values expected(n, 0.0);
      for (int64_t i = 0; i < rows * n; ++i) expected[i % n] += x[i];
      for (double& sum : expected) sum = RoundTo(dtype, sum);
      for (const DType storage : {dtype, DType::kF32}) {
        const OnGpu grad(DType::kF32, {n}, Values(n, 0.0));
        AddColumnSums(gpu, OnGpu(storage, {rows, n}, x), dtype, grad);
        ExpectNear(grad.ToValues(), expected, StepOf(dtype), 1e-5 + 2e-7 * rows);
      }
    }
  }
}

TEST(GradientSumsCuda, AddColumnSumsMatchesADoubleSum) {
  MB_NEEDS_GPU();
  CheckColumnSums(Gpu(), {{1, 1}, {2, 7}, {33, 96}, {2001, 257}, {700, 2304}, {70000, 8}, {3, 20000}});
}
TEST(GradientSumsCuda, SmallColumnSums) {
  MB_NEEDS_GPU();
  CheckColumnSums(Gpu(), {{1, 1}, {2, 7}, {33, 96}, {70, 264}});
}

// Maxima of what the kernels stored, by each of their ways through a row.
TEST(NormCuda, SmallMaxima) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const auto largest = [](const OnGpu& x) {
    double most = 0;
    for (const double value : x.ToValues()) most = std::max(most, std::fabs(value));
    return most;
  };
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, h] : {RowShape{5, 7}, {3, 64}, {9, 1000}, {17, 2048}, {6, 4096}, {4, 16384}, {2, 40008}}) {
      SCOPED_TRACE(testing::Message() << NameOf(dtype) << " " << rows << " " << h);
      const Twin x(dtype, {rows, h}, 1), gamma(dtype, {h}, 2), beta(dtype, {h}, 3), dy(dtype, {rows, h}, 4);
      const OnGpu y(dtype, {rows, h}), dx(dtype, {rows, h}), mean(DType::kF32, {rows}), rstd(DType::kF32, {rows});
      const OnGpu gamma_grad(Owned(DType::kF32, {h})), beta_grad(Owned(DType::kF32, {h}));
      NormOptions options = OptionsFor(dtype);
      for (const bool layer : {false, true}) {
        const OnGpu of_y(Owned(DType::kF32, {1})), of_dx(Owned(DType::kF32, {1}));
        options.amax = of_y;
        if (layer) {
          LayerNormForward(gpu, x.gpu, gamma.gpu, beta.gpu, options, y, mean, rstd);
        } else {
          RmsNormForward(gpu, x.gpu, gamma.gpu, options, y, rstd);
        }
        EXPECT_EQ(of_y.ToValues()[0], largest(y));
        options.amax = of_dx;
        if (layer) {
          LayerNormBackward(gpu, dy.gpu, x.gpu, gamma.gpu, mean, rstd, dy.gpu, options, dx, gamma_grad, beta_grad);
        } else {
          RmsNormBackward(gpu, dy.gpu, x.gpu, gamma.gpu, rstd, dy.gpu, options, dx, gamma_grad);
        }
        EXPECT_EQ(of_dx.ToValues()[0], largest(dx));
      }
    }
  }
}

}  // namespace
}  // namespace mbridge::test
