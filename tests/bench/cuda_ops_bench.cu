// Bandwidth of the memory-bound CUDA operators at the sizes of Llama-3.2-1B, Llama-3-8B and GPT-2 124M, against a copy on the
// device measured in the same run. Bytes are the fewest that an operator must move: each input read once, each output written
// once. Needs about 16 GiB.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/core/cuda/check.h"
#include "engine/core/device.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/dropout.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/embedding.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/layer_norm.h"
#include "engine/ops/normal_init.h"
#include "engine/ops/rms_norm.h"
#include "engine/ops/rotary.h"
#include "engine/ops/softmax_cross_entropy.h"
#include "engine/ops/swiglu.h"
#include "engine/optim/update_ops.h"

namespace mbridge {
namespace {

constexpr DType kBF16 = DType::kBF16, kF32 = DType::kF32;

class Bench {
 public:
  Bench() : device_(DeviceOf(DeviceType::kCuda)), context_(device_.MakeContext(size_t{256} << 20)) {
    cudaStream_t stream = static_cast<cudaStream_t>(context_.stream);
    stream_ = stream;
    MB_CUDA(cudaMalloc(&pool_, kPoolBytes));
    MB_CUDA(cudaMalloc(&copies_, kCopyBytes));
    MB_CUDA(cudaEventCreate(&begin_));
    MB_CUDA(cudaEventCreate(&end_));
  }
  const Context& context() const { return context_; }

  // Forgets all tensors.
  void Reset() { used_ = 0; }
  Tensor Empty(DType dtype, const Shape& shape) {
    Tensor tensor{static_cast<char*>(pool_) + used_, dtype, DeviceType::kCuda, shape};
    used_ += (tensor.bytes() + 255) / 256 * 256;
    if (used_ > kPoolBytes) ThrowEngineError("the benchmark's memory is too small");
    return tensor;
  }
  Tensor Normal(DType dtype, const Shape& shape) {
    const Tensor tensor = Empty(dtype, shape);
    DrawNormal(context_, PhiloxStream{++seed_, 0}, kHopperSmCount, 0.0f, 1.0f, tensor);
    return tensor;
  }
  Tensor Ids(const Shape& shape, int limit) {
    std::mt19937 engine(static_cast<uint32_t>(++seed_));
    std::vector<int32_t> ids(static_cast<size_t>(shape.NumElements()));
    for (int32_t& id : ids) id = static_cast<int32_t>(engine() % static_cast<uint32_t>(limit));
    const Tensor tensor = Empty(DType::kI32, shape);
    MB_CUDA(cudaMemcpy(tensor.data, ids.data(), tensor.bytes(), cudaMemcpyHostToDevice));
    return tensor;
  }

  // How many sets of tensors of `bytes` the runs go round, so that none is found in the L2 cache.
  static int SetsFor(double bytes) { return static_cast<int>(std::clamp(400e6 / bytes + 1, 1.0, 12.0)); }

  // Microseconds of one call that moves `bytes`; run(i) is call number i. A batch lasts milliseconds: the wait of the idle device
  // for its first call weighs nothing.
  double Time(double bytes, const std::function<void(int)>& run) {
    constexpr int kBatches = 5;
    const int calls = static_cast<int>(std::clamp(20e9 / bytes, 12.0, 400.0));
    for (int i = 0; i < 3; ++i) run(i);
    std::vector<double> times;
    for (int batch = 0; batch < kBatches; ++batch) {
      MB_CUDA(cudaEventRecord(begin_, stream_));
      for (int i = 0; i < calls; ++i) run(i);
      MB_CUDA(cudaEventRecord(end_, stream_));
      MB_CUDA(cudaEventSynchronize(end_));
      float milliseconds = 0;
      MB_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
      times.push_back(milliseconds * 1e3 / calls);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  // GB/s of a copy that reads and writes `bytes` together, from one place of a memory of its own to the next.
  double RateOfCopy(double bytes) {
    const size_t half = static_cast<size_t>(bytes / 2) / 256 * 256;
    const int places = static_cast<int>(std::clamp<size_t>(kCopyBytes / (2 * half), 1, 12));
    const double time = Time(bytes, [&](int i) {
      char* const from = copies_ + static_cast<size_t>(i % places) * 2 * half;
      MB_CUDA(cudaMemcpyAsync(from + half, from, half, cudaMemcpyDeviceToDevice, stream_));
    });
    return 2.0 * static_cast<double>(half) / time * 1e-3;
  }
  void MeasureCopy() {
    constexpr size_t kBytes = size_t{1} << 30;
    copy_ = RateOfCopy(2.0 * kBytes);
    std::printf("%-44s %9s %8.0f\n%-44s %9s %8s %7s %22s\n", "copy of 1 GiB, read + write", "", copy_, "operator", "us", "GB/s",
                "% copy", "% copy of as many bytes");
  }
  // Small operators end before a copy of their size is at its full rate: both shares are printed.
  void Report(const std::string& name, double bytes, const std::function<void(int)>& run) {
    const double time = Time(bytes, run), rate = bytes / time * 1e-3;
    const double same_size = bytes < 1e9 ? RateOfCopy(bytes) : copy_;
    std::printf("%-44s %9.1f %8.0f %6.1f%% %21.1f%%\n", name.c_str(), time, rate, 100 * rate / copy_, 100 * rate / same_size);
    std::fflush(stdout);
  }

 private:
  static constexpr size_t kPoolBytes = size_t{11} << 30, kCopyBytes = size_t{4} << 30;
  Device& device_;
  Context context_;
  cudaStream_t stream_;
  void* pool_ = nullptr;
  char* copies_ = nullptr;
  size_t used_ = 0;
  uint64_t seed_ = 0;
  cudaEvent_t begin_, end_;
  double copy_ = 1;
};

std::string Named(const char* what, int64_t rows, int64_t width) { return fmt::format("{} [{}, {}]", what, rows, width); }

void BenchNorms(Bench* bench, bool rms, int64_t rows, int64_t h) {
  bench->Reset();
  const Context& context = bench->context();
  const NormOptions options{.precision = kBF16};
  const double bytes = 2.0 * rows * h;
  const int sets = Bench::SetsFor(4 * bytes);
  struct Set {
    Tensor x, y, dy, residual, mean, rstd;
  };
  std::vector<Set> all;
  for (int i = 0; i < sets; ++i) {
    all.push_back({bench->Normal(kBF16, {rows, h}), bench->Empty(kBF16, {rows, h}), bench->Normal(kBF16, {rows, h}),
                   bench->Normal(kBF16, {rows, h}), bench->Empty(kF32, {rows}), bench->Empty(kF32, {rows})});
  }
  const Tensor gamma = bench->Normal(kBF16, {h}), beta = bench->Normal(kBF16, {h});
  const Tensor gamma_grad = bench->Normal(kF32, {h}), beta_grad = bench->Normal(kF32, {h});
  bench->Report(Named(rms ? "rms_norm forward" : "layer_norm forward", rows, h), 2 * bytes, [&](int i) {
    const Set& s = all[i % sets];
    rms ? RmsNormForward(context, s.x, gamma, options, s.y, s.rstd)
        : LayerNormForward(context, s.x, gamma, beta, options, s.y, s.mean, s.rstd);
  });
  if (rms) {
    bench->Report(Named("residual + rms_norm forward", rows, h), 4 * bytes, [&](int i) {
      const Set& s = all[i % sets];
      AddRmsNormForward(context, s.x, s.residual, gamma, options, s.dy, s.y, s.rstd);
    });
  }
  for (const Set& s : all) {  // Statistics of every set.
    rms ? RmsNormForward(context, s.x, gamma, options, s.y, s.rstd)
        : LayerNormForward(context, s.x, gamma, beta, options, s.y, s.mean, s.rstd);
  }
  bench->Report(Named(rms ? "rms_norm backward + residual" : "layer_norm backward + residual", rows, h), 4 * bytes, [&](int i) {
    const Set& s = all[i % sets];
    rms ? RmsNormBackward(context, s.dy, s.x, gamma, s.rstd, s.residual, options, s.y, gamma_grad)
        : LayerNormBackward(context, s.dy, s.x, gamma, s.mean, s.rstd, s.residual, options, s.y, gamma_grad, beta_grad);
  });
}

void BenchSwiGlu(Bench* bench, int64_t rows, int64_t n) {
  bench->Reset();
  const Context& context = bench->context();
  const double bytes = 2.0 * rows * n;
  const int sets = Bench::SetsFor(6 * bytes);
  struct Set {
    Tensor x, dx, y;
  };
  std::vector<Set> all;
  for (int i = 0; i < sets; ++i) {
    all.push_back({bench->Normal(kBF16, {rows, 2 * n}), bench->Empty(kBF16, {rows, 2 * n}), bench->Normal(kBF16, {rows, n})});
  }
  bench->Report(Named("swiglu backward", rows, n), 5 * bytes, [&](int i) {
    SwiGluBackward(context, all[i % sets].y, all[i % sets].x, {}, SwiGluKind::kFused, kBF16, all[i % sets].dx);
  });
  bench->Report(Named("swiglu forward", rows, n), 3 * bytes,
                [&](int i) { SwiGluForward(context, all[i % sets].x, {}, SwiGluKind::kFused, kBF16, all[i % sets].y); });
}

void BenchGelu(Bench* bench, int64_t rows, int64_t n) {
  bench->Reset();
  const Context& context = bench->context();
  const double bytes = 2.0 * rows * n;
  const Tensor x = bench->Normal(kBF16, {rows, n}), dy = bench->Normal(kBF16, {rows, n}), y = bench->Empty(kBF16, {rows, n});
  const Tensor bias = bench->Normal(kBF16, {n}), grad = bench->Normal(kF32, {n});
  for (const GeluKind kind : {GeluKind::kTanhFused, GeluKind::kErf}) {
    const char* name = kind == GeluKind::kErf ? "erf" : "tanh";
    bench->Report(Named(fmt::format("bias_gelu {} forward", name).c_str(), rows, n), 2 * bytes,
                  [&](int) { BiasGeluForward(context, x, bias, kind, kBF16, y); });
    bench->Report(Named(fmt::format("bias_gelu {} backward", name).c_str(), rows, n), 3 * bytes,
                  [&](int) { BiasGeluBackward(context, dy, x, bias, kind, kBF16, y); });
  }
  bench->Report(Named("column sums", rows, n), bytes, [&](int) { AddColumnSums(context, x, kBF16, grad); });
}

void BenchDropout(Bench* bench, int64_t rows, int64_t n) {
  bench->Reset();
  const Context& context = bench->context();
  const double count = 1.0 * rows * n;
  const Tensor x = bench->Normal(kBF16, {rows, n}), residual = bench->Normal(kBF16, {rows, n}),
               y = bench->Empty(kBF16, {rows, n});
  const Tensor bias = bench->Normal(kBF16, {n}), grad = bench->Normal(kF32, {n}), keep = bench->Empty(DType::kU8, {rows, n});
  bench->Report(Named("eager dropout mask", rows, n), count, [&](int) {
    DrawEagerDropoutMask(context, PhiloxStream{1, 0}, kHopperSmCount, 0.1, 2, keep);
  });
  bench->Report(Named("compiled dropout mask", rows, n), count, [&](int) { DrawCompiledDropoutMask(context, 5, 0.1, keep); });
  bench->Report(Named("bias_dropout_add forward", rows, n), 7 * count,
                [&](int) { BiasDropoutAddForward(context, x, bias, residual, keep, 0.1, DropoutKind::kCompiled, kBF16, y); });
  bench->Report(Named("bias_dropout_add backward", rows, n), 5 * count,
                [&](int) { BiasDropoutAddBackward(context, x, keep, 0.1, DropoutKind::kCompiled, kBF16, y, grad); });
}

void BenchRotary(Bench* bench, int64_t rows, const QkvLayout& layout) {
  bench->Reset();
  const double bytes = 2.0 * rows * (layout.heads + layout.groups) * layout.head_size;
  const int sets = Bench::SetsFor(bytes);
  const Tensor cosine = bench->Normal(kF32, {rows, layout.head_size / 2}),
               sine = bench->Normal(kF32, {rows, layout.head_size / 2});
  std::vector<Tensor> all;
  for (int i = 0; i < sets; ++i) all.push_back(bench->Normal(kBF16, {rows, 1, layout.width()}));
  bench->Report(Named("rotary", rows, layout.width()), 2 * bytes, [&](int i) {
    Rotary(bench->context(), all[i % sets], cosine, sine, layout, RotaryPairs::kHalves, RotaryDirection::kForward, kBF16);
  });
}

void BenchEmbedding(Bench* bench, int64_t rows, int64_t h, int64_t vocabulary) {
  bench->Reset();
  const Context& context = bench->context();
  const Tensor ids = bench->Ids({1, rows}, static_cast<int>(vocabulary)), words = bench->Normal(kBF16, {vocabulary, h});
  const Tensor y = bench->Normal(kBF16, {rows, 1, h}), grad = bench->Normal(kF32, {vocabulary, h});
  const Tensor touched = bench->Empty(DType::kI32, {vocabulary}), gathered = bench->Empty(kF32, {rows, h});
  bench->Report(Named("embedding backward (most ids once)", rows, h), (2.0 + 8.0) * rows * h,
                [&](int) { EmbeddingBackward(context, ids, y, kBF16, EmbeddingSum::kMainGradient, grad, touched, gathered); });
  bench->Report(Named("embedding forward", rows, h), 4.0 * rows * h,
                [&](int) { EmbeddingForward(context, ids, {}, words, {}, {}, 0.0, kBF16, y); });
}

void BenchCrossEntropy(Bench* bench, int64_t rows, int64_t vocabulary) {
  bench->Reset();
  const Context& context = bench->context();
  const Tensor logits = bench->Normal(kBF16, {rows, vocabulary}), labels = bench->Ids({rows}, static_cast<int>(vocabulary));
  const Tensor weight = bench->Normal(kF32, {rows}), loss = bench->Empty(kF32, {rows});
  const double bytes = 2.0 * rows * vocabulary;
  bench->Report(Named("cross entropy, loss alone", rows, vocabulary), bytes,
                [&](int) { SoftmaxCrossEntropy(context, logits, labels, {}, kBF16, loss); });
  bench->Report(Named("cross entropy, loss + gradient", rows, vocabulary), 2 * bytes,
                [&](int) { SoftmaxCrossEntropy(context, logits, labels, weight, kBF16, loss); });
}

void BenchOptimizer(Bench* bench, int64_t count) {
  bench->Reset();
  const Context& context = bench->context();
  std::vector<UpdatePiece> pieces;
  for (int64_t begin = 0; begin < count; begin += 16384) pieces.push_back({begin, 16384, 1});
  const Tensor memory = bench->Empty(DType::kU8, {static_cast<int64_t>(pieces.size() * sizeof(UpdatePiece))});
  MB_CUDA(cudaMemcpy(memory.data, pieces.data(), memory.bytes(), cudaMemcpyHostToDevice));
  const PieceList list{static_cast<const UpdatePiece*>(memory.data), static_cast<int64_t>(pieces.size())};
  const auto array = [&] { return bench->Normal(kF32, {count}); };
  const Tensor gradient = array(), value = bench->Empty(kBF16, {count}), sums = bench->Empty(DType::kF64, {list.count});
  const AdamBuffers buffers{gradient, array(), bench->Empty(kF32, {count}), array(), value, {}, 0};
  MB_CUDA(cudaMemset(buffers.second.data, 0, buffers.second.bytes()));
  MB_CUDA(cudaDeviceSynchronize());
  const AdamFactors factors = MakeAdamFactors({}, 3, 1e-4, 0.1, 1.0f, 1.0f);
  bench->Report(fmt::format("sum of squares [{}]", count), 4.0 * count,
                [&](int) { SumOfSquares(context, gradient, 0, list, 1.0f, sums); });
  bench->Report(fmt::format("adam, fp32 state, bf16 out [{}]", count), 30.0 * count,
                [&](int) { UpdatePieces(context, buffers, list, factors, factors); });
  const auto narrow = [&](const Tensor& wide) { return Tensor{wide.data, kBF16, DeviceType::kCuda, {count}}; };
  const AdamBuffers narrow_buffers{gradient, narrow(buffers.first), narrow(buffers.second), {}, value, narrow(buffers.master), 0};
  MB_CUDA(cudaMemset(buffers.first.data, 0, buffers.first.bytes()));
  MB_CUDA(cudaMemset(buffers.second.data, 0, buffers.second.bytes()));
  MB_CUDA(cudaDeviceSynchronize());
  bench->Report(fmt::format("adam, bf16 moments, split master [{}]", count), 20.0 * count,
                [&](int) { UpdatePieces(context, narrow_buffers, list, factors, factors); });
  const int64_t part = count / 2;
  bench->Report(fmt::format("add gradient bf16 to fp32 [{}]", part), 10.0 * part,
                [&](int) { AddGradient(context, value.Rows(0, part), kBF16, gradient.Rows(0, part)); });
}

void Run() {
  Bench bench;
  bench.MeasureCopy();
  BenchNorms(&bench, true, 8192, 2048);
  BenchNorms(&bench, true, 8192, 4096);
  BenchNorms(&bench, false, 65536, 768);
  BenchSwiGlu(&bench, 8192, 8192);
  BenchSwiGlu(&bench, 8192, 14336);
  BenchGelu(&bench, 65536, 3072);
  BenchDropout(&bench, 65536, 768);
  BenchRotary(&bench, 8192, {32, 8, 64});
  BenchRotary(&bench, 8192, {32, 8, 128});
  BenchEmbedding(&bench, 8192, 2048, 128256);
  BenchEmbedding(&bench, 65536, 768, 50304);
  BenchCrossEntropy(&bench, 8192, 128256);
  BenchCrossEntropy(&bench, 16384, 50304);
  BenchOptimizer(&bench, int64_t{1} << 28);
}

}  // namespace
}  // namespace mbridge

int main() {
  try {
    mbridge::Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
