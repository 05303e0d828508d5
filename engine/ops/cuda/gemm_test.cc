#include "engine/ops/gemm.h"

#include <filesystem>
#include <fstream>

#include "engine/ops/cuda/gemm_tuning.h"
#include "engine/ops/cuda/test_device.h"

namespace mbridge::test {
namespace {

class GemmCuda : public testing::Test {
 protected:
  void SetUp() override {
    MB_NEEDS_GPU();
    cuda::SetGemmTuning({.time_candidates = false});
  }
  void TearDown() override {
    if (HasGpu()) cuda::SetGemmTuning({});
  }
};

// A product of random matrices that are windows, `offset` elements into rows that are `padding` longer.
struct Problem {
  int64_t m, n, k;
  DType in = DType::kBF16, out = DType::kBF16;
  GemmOptions options = {};
  int64_t offset = 0, padding = 0;
};

double StepOf(DType dtype) { return dtype == DType::kBF16 ? 1.0 / 256 : dtype == DType::kF16 ? 1.0 / 2048 : 1e-6; }

struct Operand {
  Operand(const Problem& p, int64_t rows, int64_t cols, DType dtype, uint32_t seed)
      : stride(cols + p.padding),
        offset(p.offset),
        values(RandomValues(rows * stride, seed, 1.0, dtype)),
        device(dtype, {rows, stride}, values),
        window(ColumnsOf(AsMatrix(device), offset, cols)) {}
  double At(int64_t row, int64_t col) const { return values[row * stride + offset + col]; }
  int64_t stride, offset;
  Values values;
  OnGpu device;
  Matrix window;
};

// Runs the product and compares every `skip`-th element with sums in double; outside of the window nothing may change.
void ExpectRight(const Gpu& gpu, const Problem& p, int64_t skip = 1) {
  const bool ta = p.options.transpose_a, tb = p.options.transpose_b;
  const Operand a(p, ta ? p.k : p.m, ta ? p.m : p.k, p.in, 1), b(p, tb ? p.n : p.k, tb ? p.k : p.n, p.in, 2);
  const int64_t stride = p.n + p.padding;
  const Values before = RandomValues(p.m * stride, 3, 1.0, p.out);
  const OnGpu c(p.out, {p.m, stride}, before);
  Gemm(gpu, a.window, b.window, ColumnsOf(AsMatrix(c), p.offset, p.n), p.options);
  const Values after = c.ToValues();
  const double absolute = 2e-7 * static_cast<double>(p.k);
  int64_t wrong = 0;
  for (int64_t at = 0; at < p.m * stride && wrong < 3; at += skip) {
    const int64_t i = at / stride, j = at % stride - p.offset;
    double expected = before[at], relative = 0;
    if (j >= 0 && j < p.n) {
      double sum = 0;
      for (int64_t l = 0; l < p.k; ++l) sum += (ta ? a.At(l, i) : a.At(i, l)) * (tb ? b.At(j, l) : b.At(l, j));
      expected = p.options.alpha * sum + (p.options.accumulate ? before[at] : 0.0);
      relative = StepOf(p.out);
    }
    if (std::fabs(after[at] - expected) <= relative * std::fabs(expected) + (relative > 0 ? absolute : 0)) continue;
    ++wrong;
    ADD_FAILURE() << p.m << " x " << p.n << " x " << p.k << ' ' << NameOf(p.in) << " to " << NameOf(p.out) << " transposed " << ta
                  << tb << " accumulate " << p.options.accumulate << ": element " << i << ", " << j << " is " << after[at]
                  << ", expected " << expected;
  }
}

TEST_F(GemmCuda, SmallShapesOfEveryType) {
  const Gpu gpu;
  for (const DType in : kGpuTypes) {
    for (const DType out : kGpuTypes) {
      for (int flags = 0; flags < 4; ++flags) {
        const GemmOptions options{.transpose_a = (flags & 1) != 0, .transpose_b = (flags & 2) != 0, .alpha = 0.5f};
        ExpectRight(gpu, {7, 13, 19, in, out, options});
        ExpectRight(gpu, {64, 24, 40, in, out, options});
      }
    }
  }
}

TEST_F(GemmCuda, Windows) {
  const Gpu gpu;
  for (const DType in : kGpuTypes) {
    for (int flags = 0; flags < 8; ++flags) {
      const GemmOptions options{.transpose_a = (flags & 1) != 0, .transpose_b = (flags & 2) != 0, .accumulate = (flags & 4) != 0};
      ExpectRight(gpu, {33, 20, 50, in, DType::kF32, options, 3, 5});
      ExpectRight(gpu, {33, 24, 48, in, DType::kF32, options, 8, 16});
    }
  }
}

// Head products: logits, gradient of the input, and gradient of the weight added to F32 sums.
TEST_F(GemmCuda, Vocabularies) {
  const Gpu gpu;
  for (const int64_t vocabulary : {50257, 50304, 128256}) {
    constexpr int64_t kTokens = 24, kHidden = 64, kSkip = 997;
    ExpectRight(gpu, {kTokens, vocabulary, kHidden, DType::kBF16, DType::kBF16, {.transpose_b = true}}, kSkip);
    ExpectRight(gpu, {kTokens, kHidden, vocabulary, DType::kBF16, DType::kBF16, {}}, 101);
    ExpectRight(gpu, {vocabulary, kHidden, kTokens, DType::kBF16, DType::kF32, {.transpose_a = true, .accumulate = true}}, kSkip);
  }
  ExpectRight(gpu, {5, 50257, 32, DType::kF32, DType::kF32, {.transpose_b = true}}, 97);
}

// A result type that cuBLASLt does not have goes through the workspace, here in several blocks of rows.
TEST_F(GemmCuda, SmallWorkspaceMakesBlocks) {
  const Gpu gpu(size_t{64} << 10);
  ExpectRight(gpu, {131, 128, 33, DType::kF32, DType::kBF16, {}});
  ExpectRight(gpu, {131, 128, 33, DType::kBF16, DType::kF16, {.transpose_a = true}});
}

TEST_F(GemmCuda, NothingToAddUp) {
  const Gpu gpu;
  for (const bool accumulate : {false, true})
    ExpectRight(gpu, {3, 5, 0, DType::kBF16, DType::kF32, {.accumulate = accumulate}, 1, 2});
}

// Trials of the algorithms must leave the sums alone, and the choice must hold: the same bits at every call.
TEST_F(GemmCuda, TrialsDoNotTouchTheSums) {
  cuda::SetGemmTuning({.time_candidates = true});
  const Gpu gpu;
  ExpectRight(gpu, {96, 80, 200, DType::kBF16, DType::kF32, {.transpose_a = true, .accumulate = true}});
  ExpectRight(gpu, {512, 1000, 768, DType::kBF16, DType::kBF16, {.transpose_b = true}}, 31);
  const OnGpu a(DType::kBF16, {96, 200}, RandomValues(96 * 200, 5)), b(DType::kBF16, {200, 64}, RandomValues(200 * 64, 6));
  const OnGpu once(DType::kF32, {96, 64}), twice(DType::kF32, {96, 64});
  Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(once), {});
  Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(twice), {});
  const Values single = once.ToValues();
  EXPECT_EQ(single, twice.ToValues());
  Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(twice), {.accumulate = true});
  Values doubled = single;
  for (double& x : doubled) x *= 2;
  ExpectNear(twice.ToValues(), doubled, 1e-6, 1e-6);
}

TEST_F(GemmCuda, ReplaysInAGraph) {
  cuda::SetGemmTuning({});
  const Gpu gpu;
  const OnGpu a(DType::kBF16, {40, 72}, RandomValues(40 * 72, 5)), b(DType::kBF16, {72, 56}, RandomValues(72 * 56, 6));
  const OnGpu c(DType::kF32, {40, 56});
  Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(c), {});
  const Values single = c.ToValues();
  const auto stream = static_cast<cudaStream_t>(gpu.context().stream);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  MB_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(c), {.accumulate = true});
  MB_CUDA(cudaStreamEndCapture(stream, &graph));
  MB_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  EXPECT_EQ(c.ToValues(), single);
  for (int i = 0; i < 3; ++i) MB_CUDA(cudaGraphLaunch(executable, stream));
  Values expected = single;
  for (double& x : expected) x *= 4;
  ExpectNear(c.ToValues(), expected, 2e-6, 2e-6);
  MB_CUDA(cudaGraphExecDestroy(executable));
  MB_CUDA(cudaGraphDestroy(graph));
}

TEST_F(GemmCuda, ChoicesOutliveTheProcess) {
  const std::string path = std::filesystem::temp_directory_path() / fmt::format("gemm_choices_{}", getpid());
  std::filesystem::remove(path);
  const Gpu gpu;
  const OnGpu a(DType::kBF16, {300, 512}, RandomValues(300 * 512, 5)), b(DType::kBF16, {512, 264}, RandomValues(512 * 264, 6));
  Values results[2];
  std::string texts[2];
  for (int run = 0; run < 2; ++run) {
    cuda::SetGemmTuning({.time_candidates = true, .cache_file = path});
    const OnGpu c(DType::kBF16, {300, 264});
    Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(c), {});
    results[run] = c.ToValues();
    std::ifstream file(path);
    texts[run].assign(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(std::count(texts[run].begin(), texts[run].end(), '\n'), 2);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(texts[0], texts[1]);
  std::ofstream(path, std::ios::app) << "12 pears\n";
  EXPECT_THROW(cuda::SetGemmTuning({.cache_file = path}), EngineError);
  std::ofstream(path) << "of another machine\n12 pears\n";
  EXPECT_NO_THROW(cuda::SetGemmTuning({.cache_file = path}));
  std::filesystem::remove(path);
}

TEST_F(GemmCuda, RefusesWhatDoesNotFit) {
  const Gpu gpu;
  const OnGpu a(DType::kF32, {6, 4}), b(DType::kF32, {5, 3}), c(DType::kBF16, {6, 3}), d(DType::kBF16, {4, 3});
  EXPECT_THROW(Gemm(gpu, AsMatrix(a), AsMatrix(b), AsMatrix(c), {}), EngineError);
  EXPECT_THROW(Gemm(gpu, AsMatrix(a), AsMatrix(d), AsMatrix(c), {}), EngineError);
  const OnGpu e(DType::kF32, {4, 3});
  EXPECT_THROW(Gemm(gpu, AsMatrix(a), AsMatrix(e), AsMatrix(c), {.accumulate = true}), EngineError);
}

}  // namespace
}  // namespace mbridge::test
