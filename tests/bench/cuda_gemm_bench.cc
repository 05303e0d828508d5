// Rates of the matrix products and of the attention of Llama-3.2-1B and Llama-3-8B on one GPU, for 8192 tokens, and the step time
// that they alone allow: from medians of single launches by CUDA events, between which the GPU rests, and from all of them one
// after the other in a step's order, at the clocks that it keeps up. Random data. Nothing to give it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/cuda/check.h"
#include "engine/core/device.h"
#include "engine/ops/cuda/gemm_tuning.h"
#include "engine/ops/flash_attention.h"
#include "engine/ops/fp8_gemm.h"
#include "engine/ops/gemm.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge {
namespace {

constexpr int64_t kTokens = 8192, kVocabulary = 128256;
constexpr double kPeakTflops = 989;

class Bench {
 public:
  Bench() {
    MB_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    MB_CUDA(cudaEventCreate(&begin_));
    MB_CUDA(cudaEventCreate(&end_));
    constexpr size_t kWorkspace = size_t{64} << 20;
    context_ = {DeviceType::kCuda, stream_, DeviceOf(DeviceType::kCuda).Allocate(kWorkspace, "workspace"), kWorkspace};
  }

  // Memory of `count` elements with random values in (-1, 1); never freed.
  void* Random(DType dtype, int64_t count) {
    constexpr int64_t kPattern = 1 << 22;
    static const std::vector<uint16_t> pattern = [] {
      std::vector<uint16_t> values(kPattern);
      std::mt19937 engine(1);
      std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
      for (uint16_t& x : values) x = ToBFloat16(uniform(engine)).bits;
      return values;
    }();
    const auto bytes = static_cast<int64_t>(SizeOf(dtype)) * count;
    auto* memory = static_cast<char*>(DeviceOf(DeviceType::kCuda).Allocate(bytes, "operand"));
    for (int64_t at = 0; at < bytes; at += kPattern * 2) {
      MB_CUDA(cudaMemcpy(memory + at, pattern.data(), std::min(kPattern * 2, bytes - at), cudaMemcpyHostToDevice));
    }
    return memory;
  }

  // Median milliseconds, after one call that is not counted.
  template <class F> double Time(F&& launch) {
    launch();
    std::vector<float> times(9);
    for (float& time : times) {
      MB_CUDA(cudaEventRecord(begin_, stream_));
      launch();
      MB_CUDA(cudaEventRecord(end_, stream_));
      MB_CUDA(cudaEventSynchronize(end_));
      MB_CUDA(cudaEventElapsedTime(&time, begin_, end_));
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

  const Context& context() const { return context_; }

 private:
  Context context_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

struct Model {
  const char* name;
  int64_t layers, hidden, ffn, heads, groups, head_size;
  int64_t qkv() const { return QkvLayout{heads, groups, head_size}.width(); }
};
constexpr Model kModels[] = {{"1B", 16, 2048, 8192, 32, 8, 64}, {"8B", 32, 4096, 14336, 32, 8, 128}};

// A product of a layer, [tokens, in] x [out, in]^T, with its two gradients.
struct Linear {
  std::string name;
  int64_t in, out, count;
};

std::vector<Linear> LinearsOf(const Model& m) {
  return {{std::string(m.name) + " qkv", m.hidden, m.qkv(), m.layers},
          {std::string(m.name) + " proj", m.heads * m.head_size, m.hidden, m.layers},
          {std::string(m.name) + " fc1", m.hidden, 2 * m.ffn, m.layers},
          {std::string(m.name) + " fc2", m.ffn, m.hidden, m.layers},
          {std::string(m.name) + " head", m.hidden, kVocabulary, 1}};
}

// `output` is random as an operand of the gradients; results go elsewhere, so that values do not grow from product to product.
struct Operands {
  Matrix input, weight, output, weight_grad, result;
};

// The three products of a layer's linear map.
class LinearProducts {
 public:
  LinearProducts(Bench& bench, const Operands& x, const Linear& linear) : context_(bench.context()) {
    const auto sized = [](Matrix matrix, int64_t rows, int64_t cols) {
      return Matrix{matrix.data, matrix.dtype, rows, cols, cols};
    };
    input_ = sized(x.input, kTokens, linear.in), weight_ = sized(x.weight, linear.out, linear.in);
    output_ = sized(x.output, kTokens, linear.out), weight_grad_ = sized(x.weight_grad, linear.out, linear.in);
    result_ = sized(x.result, kTokens, linear.out), input_grad_ = sized(x.result, kTokens, linear.in);
  }
  void Forward() const { Gemm(context_, input_, weight_, result_, {.transpose_b = true}); }
  void InputGradient() const { Gemm(context_, output_, weight_, input_grad_, {}); }
  void WeightGradient() const { Gemm(context_, output_, input_, weight_grad_, {.transpose_a = true, .accumulate = true}); }
  void Backward() const {
    InputGradient();
    WeightGradient();
  }

 private:
  Context context_;
  Matrix input_, weight_, output_, weight_grad_, result_, input_grad_;
};

// Milliseconds of forward, input gradient and weight gradient (added to F32).
std::vector<double> TimesOf(Bench& bench, const Operands& x, const Linear& linear) {
  const LinearProducts products(bench, x, linear);
  return {bench.Time([&] { products.Forward(); }), bench.Time([&] { products.InputGradient(); }),
          bench.Time([&] { products.WeightGradient(); })};
}

double Ceiling(Bench& bench, const Operands& x) {
  constexpr int64_t kN = 8192;
  const Matrix a{x.input.data, DType::kBF16, kN, kN, kN}, b{x.weight.data, DType::kBF16, kN, kN, kN};
  const Matrix c{x.result.data, DType::kBF16, kN, kN, kN};
  const double ms = bench.Time([&] { Gemm(bench.context(), a, b, c, {.transpose_b = true}); });
  return 2.0 * kN * kN * kN / ms / 1e9;
}

// Milliseconds of a model's products for one pass over the tokens, each timed alone. That a device runs each faster alone, cool
// and below its power limit, than all of them one after the other is why the ceiling of a step is taken from the latter.
struct ProductTimes {
  double first = 0, picked = 0;  // By cuBLASLt's first suggestions, which a step uses, and by timed choices.
};

// Prints the products of one model.
ProductTimes BenchProducts(Bench& bench, const Operands& x, const Model& model, double ceiling) {
  ProductTimes total;
  std::vector<std::vector<double>> first, picked;
  for (const bool timed : {false, true}) {
    cuda::SetGemmTuning({.time_candidates = timed});
    for (const Linear& linear : LinearsOf(model)) (timed ? picked : first).push_back(TimesOf(bench, x, linear));
  }
  const std::vector<Linear> linears = LinearsOf(model);
  for (size_t i = 0; i < linears.size(); ++i) {
    for (int pass = 0; pass < 3; ++pass) {
      const double operations = 2.0 * kTokens * linears[i].in * linears[i].out;
      const double rate = operations / picked[i][pass] / 1e9;
      std::printf("%-8s %-7s %8.3f ms  %6.0f TFLOP/s  %3.0f %% of peak  %3.0f %% of ceiling  (first suggestion %6.0f)\n",
                  linears[i].name.c_str(),
                  pass == 0   ? "forward"
                  : pass == 1 ? "dgrad"
                              : "wgrad",
                  picked[i][pass], rate, 100 * rate / kPeakTflops, 100 * rate / ceiling, operations / first[i][pass] / 1e9);
      total.picked += picked[i][pass] * static_cast<double>(linears[i].count);
      total.first += first[i][pass] * static_cast<double>(linears[i].count);
    }
  }
  return total;
}

// The same products in 8 bits, all of the form that Hopper has, and the making of an operand with its transpose.
void BenchFp8(Bench& bench, const Operands& x, const Model& model) {
  const Tensor one{bench.Random(DType::kF32, 1), DType::kF32, DeviceType::kCuda, {1}};
  const float scale = 1.0f;
  MB_CUDA(cudaMemcpy(one.data, &scale, sizeof scale, cudaMemcpyHostToDevice));
  const Tensor source{x.input.data, DType::kBF16, DeviceType::kCuda, {kTokens, model.ffn}};
  const int64_t largest = std::max(2 * model.ffn, model.qkv());  // Operands are [tokens, largest] or [largest, ffn] at most.
  const auto codes = [&](int64_t count) { return bench.Random(DType::kU8, count); };
  void *a = codes(kTokens * largest), *b = codes(std::max(kTokens, largest) * model.ffn);
  const Tensor rowwise{a, DType::kU8, DeviceType::kCuda, {kTokens, model.ffn}};
  const Tensor columnwise{b, DType::kU8, DeviceType::kCuda, {model.ffn, kTokens}};
  const double cast = bench.Time([&] { Fp8Quantize(bench.context(), source, one, Fp8Format::kE4M3, rowwise, columnwise, {}); });
  std::printf("%s 8-bit copy and transpose [%ld, %ld]: %.3f ms, %.0f GB/s\n", model.name, long{kTokens}, long{model.ffn}, cast,
              4.0 * kTokens * static_cast<double>(model.ffn) / cast / 1e6);
  // Random bytes hold NaN codes: operands come from the copy, over and over.
  for (void* codes_of : {a, b}) {
    const int64_t count = codes_of == a ? kTokens * largest : std::max(kTokens, largest) * model.ffn;
    Fp8Quantize(bench.context(), source, one, Fp8Format::kE4M3, rowwise, {}, {});
    for (int64_t at = 0; at < count; at += rowwise.size()) {
      if (codes_of == a && at == 0) continue;
      MB_CUDA(cudaMemcpyAsync(static_cast<char*>(codes_of) + at, a, std::min(rowwise.size(), count - at),
                              cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(bench.context().stream)));
    }
  }
  const auto product = [&](int64_t m, int64_t n, int64_t k, const Matrix& result, const Fp8GemmOptions& options) {
    const auto* inverse = static_cast<const float*>(one.data);
    return bench.Time([&] {
      Fp8Gemm(bench.context(), {a, Fp8Format::kE4M3, inverse, m, k, k}, {b, Fp8Format::kE4M3, inverse, n, k, k},
              {result.data, result.dtype, m, n, n}, options);
    });
  };
  for (const Linear& linear : LinearsOf(model)) {
    if (linear.out == kVocabulary) continue;
    const double operations = 2.0 * kTokens * linear.in * linear.out / 1e9;
    std::printf("%-8s 8-bit  TFLOP/s: forward %5.0f  dgrad %5.0f  wgrad %5.0f\n", linear.name.c_str(),
                operations / product(kTokens, linear.out, linear.in, x.result, {.fast_accumulate = true}),
                operations / product(kTokens, linear.in, linear.out, x.result, {}),
                operations / product(linear.out, linear.in, kTokens, x.weight_grad, {.accumulate = true}));
  }
  for (void* memory : {a, b, one.data}) DeviceOf(DeviceType::kCuda).Free(memory);
}

// One attention problem with random operands, which it frees.
class Attention {
 public:
  Attention(Bench& bench, int64_t heads, int64_t groups, int64_t d)
      : bench_(bench),
        options_{.seq_length = kTokens,
                 .batch = 1,
                 .heads = heads,
                 .groups = groups,
                 .head_size = d,
                 .scale = 1.0f / std::sqrt(static_cast<float>(d))},
        refusal_(FlashAttentionRefusal(options_, DType::kBF16)) {
    if (!refusal_.empty()) return;
    const int64_t width = QkvLayout{heads, groups, d}.width();
    qkv_ = Make(DType::kBF16, {kTokens, 1, width});
    d_qkv_ = Make(DType::kBF16, {kTokens, 1, width});
    context_ = Make(DType::kBF16, {kTokens, 1, heads * d});
    d_context_ = Make(DType::kBF16, {kTokens, 1, heads * d});
    stats_ = Make(DType::kF32, {1, heads, kTokens});
    workspace_ = Make(DType::kU8, {FlashAttentionWorkspaceBytes(options_)});
  }
  ~Attention() {
    for (const Tensor& x : {qkv_, d_qkv_, context_, d_context_, stats_, workspace_}) {
      if (!x.empty()) DeviceOf(DeviceType::kCuda).Free(x.data);
    }
  }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  const std::string& refusal() const { return refusal_; }
  double operations() const {  // Two causal products.
    return 2.0 * kTokens * kTokens * static_cast<double>(options_.heads * options_.head_size);
  }
  void Forward() const { FlashAttentionForward(bench_.context(), qkv_, options_, stats_, context_, workspace_); }
  void Backward() const {
    FlashAttentionBackward(bench_.context(), d_context_, qkv_, context_, stats_, options_, d_qkv_, workspace_);
  }

 private:
  Tensor Make(DType dtype, const Shape& shape) {
    return {bench_.Random(dtype, shape.NumElements()), dtype, DeviceType::kCuda, shape};
  }
  Bench& bench_;
  FlashAttentionOptions options_;
  std::string refusal_;
  Tensor qkv_, d_qkv_, context_, d_context_, stats_, workspace_;
};

struct AttentionTimes {
  double forward = 0, backward = 0;
};

AttentionTimes BenchAttention(Bench& bench, const char* name, const Attention& attention) {
  if (!attention.refusal().empty()) {
    std::printf("attention %s: %s\n", name, attention.refusal().c_str());
    return {};
  }
  const AttentionTimes times{bench.Time([&] { attention.Forward(); }), bench.Time([&] { attention.Backward(); })};
  std::printf("attention %-26s forward %7.3f ms %5.0f TFLOP/s  backward %7.3f ms %5.0f TFLOP/s\n", name, times.forward,
              attention.operations() / times.forward / 1e9, times.backward, 2.5 * attention.operations() / times.backward / 1e9);
  return times;
}

// Milliseconds of a microbatch's products and attention in a step's order, once the clocks have settled.
double InSequence(Bench& bench, const Operands& x, const Model& model, const Attention& attention) {
  std::vector<Linear> linears = LinearsOf(model);
  std::vector<LinearProducts> products;
  for (const Linear& linear : linears) products.emplace_back(bench, x, linear);
  const auto microbatch = [&] {
    for (int64_t layer = 0; layer < model.layers; ++layer) {
      products[0].Forward();
      if (attention.refusal().empty()) attention.Forward();
      for (int i = 1; i <= 3; ++i) products[i].Forward();
    }
    products[4].Forward();
    products[4].Backward();
    for (int64_t layer = 0; layer < model.layers; ++layer) {
      for (int i = 3; i >= 1; --i) products[i].Backward();
      if (attention.refusal().empty()) attention.Backward();
      products[0].Backward();
    }
  };
  const int warm = model.layers > 16 ? 2 : 8;
  for (int i = 0; i < warm; ++i) microbatch();
  return bench.Time(microbatch);
}

// only_ceiling: prints the line of the ceiling and nothing else.
int Run(bool only_ceiling) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::puts("no GPU on this machine");
    return 0;
  }
  Bench bench;
  constexpr int64_t kHidden = 4096, kFfn = 14336;
  const Operands x{{bench.Random(DType::kBF16, kTokens * kFfn), DType::kBF16, 0, 0, 0},
                   {bench.Random(DType::kBF16, kVocabulary * kHidden), DType::kBF16, 0, 0, 0},
                   {bench.Random(DType::kBF16, kTokens * kVocabulary), DType::kBF16, 0, 0, 0},
                   {bench.Random(DType::kF32, kVocabulary * kHidden), DType::kF32, 0, 0, 0},
                   {bench.Random(DType::kBF16, kTokens * kVocabulary), DType::kBF16, 0, 0, 0}};
  const double ceiling = Ceiling(bench, x);
  if (only_ceiling) {
    std::printf("ceiling: %.0f TFLOP/s for 8192^3 BF16\n", ceiling);
    return 0;
  }
  std::vector<std::string> lines;
  for (const Model& model : kModels) {
    const ProductTimes products = BenchProducts(bench, x, model, ceiling);
    BenchFp8(bench, x, model);
    const Attention attention(bench, model.heads, model.groups, model.head_size);
    const AttentionTimes times = BenchAttention(bench, model.name, attention);
    const double attentions = static_cast<double>(model.layers) * (times.forward + times.backward);
    for (const auto& [how, product] : {std::pair{"first suggestions", products.first}, {"timed choices", products.picked}}) {
      lines.push_back(fmt::format("{}: each alone, {}: products {:.1f} ms, attention {:.1f} ms for {} tokens, {:.1f}K tokens/s",
                                  model.name, how, product, attentions, kTokens, kTokens / (product + attentions)));
    }
    for (const bool timed : {false, true, false, true}) {
      cuda::SetGemmTuning({.time_candidates = timed});
      const double sequence = InSequence(bench, x, model, attention);
      lines.push_back(fmt::format("{}: one after the other, {}: {:.1f} ms, {:.1f}K tokens/s", model.name,
                                  timed ? "timed choices" : "first suggestions", sequence, kTokens / sequence));
    }
    cuda::SetGemmTuning({});
  }
  BenchAttention(bench, "hq64 hk8 d128 (1.708/5.083)", Attention(bench, 64, 8, 128));
  std::printf("ceiling: %.0f TFLOP/s for 8192^3 BF16\n", ceiling);
  for (const std::string& line : lines) std::puts(line.c_str());
  return 0;
}

}  // namespace
}  // namespace mbridge

int main(int argc, char** argv) {
  try {
    return mbridge::Run(argc > 1 && std::string_view(argv[1]) == "ceiling");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
