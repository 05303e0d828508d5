// Times of what experts and latent attention add to a layer, at the sizes of DeepSeek-V2-Lite (one sequence of 4096 tokens, 6 of
// 64 experts each) and of Mixtral 8x7B (2 of 8): products in TFLOP/s, the others in GB/s of the fewest bytes that they must move.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/core/cuda/check.h"
#include "engine/core/device.h"
#include "engine/ops/expert_activation.h"
#include "engine/ops/grouped_gemm.h"
#include "engine/ops/mla_heads.h"
#include "engine/ops/moe_permute.h"
#include "engine/ops/normal_init.h"
#include "engine/ops/router.h"

namespace mbridge {
namespace {

constexpr DType kBF16 = DType::kBF16, kF32 = DType::kF32, kI32 = DType::kI32;

class Bench {
 public:
  Bench() : context_(DeviceOf(DeviceType::kCuda).MakeContext(size_t{128} << 20)) {
    MB_CUDA(cudaEventCreate(&begin_));
    MB_CUDA(cudaEventCreate(&end_));
  }
  const Context& context() const { return context_; }

  Tensor Empty(DType dtype, const Shape& shape) {
    memory_.push_back(AllocateZeroed(DeviceType::kCuda, shape.NumElements() * SizeOf(dtype), "a benchmark"));
    return {memory_.back().get(), dtype, DeviceType::kCuda, shape};
  }
  Tensor Normal(DType dtype, const Shape& shape) {
    const Tensor tensor = Empty(dtype, shape);
    DrawNormal(context_, PhiloxStream{++seed_, 0}, kHopperSmCount, 0.0f, 1.0f, tensor);
    return tensor;
  }
  void Reset() {
    DeviceOf(DeviceType::kCuda).Synchronize(context_);
    memory_.clear();
  }

  // Microseconds of one call.
  double Time(const std::function<void()>& run) {
    constexpr int kCalls = 8, kBatches = 5;
    for (int i = 0; i < 3; ++i) run();
    std::vector<double> times;
    for (int batch = 0; batch < kBatches; ++batch) {
      MB_CUDA(cudaEventRecord(begin_, static_cast<cudaStream_t>(context_.stream)));
      for (int i = 0; i < kCalls; ++i) run();
      MB_CUDA(cudaEventRecord(end_, static_cast<cudaStream_t>(context_.stream)));
      MB_CUDA(cudaEventSynchronize(end_));
      float milliseconds = 0;
      MB_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
      times.push_back(milliseconds * 1e3 / kCalls);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  void Product(const std::string& name, double flops, const std::function<void()>& run) {
    const double time = Time(run);
    std::printf("%-44s %9.1f us %8.0f TFLOP/s\n", name.c_str(), time, flops / time * 1e-6);
  }
  void Traffic(const std::string& name, double bytes, const std::function<void()>& run) {
    const double time = Time(run);
    std::printf("%-44s %9.1f us %8.0f GB/s\n", name.c_str(), time, bytes / time * 1e-3);
  }

 private:
  Context context_;
  cudaEvent_t begin_, end_;
  uint64_t seed_ = 0;
  std::vector<std::shared_ptr<void>> memory_;
};

std::vector<Tensor> Cut(const Tensor& all) {
  std::vector<Tensor> parts;
  for (int64_t e = 0; e < all.shape[0]; ++e) parts.push_back(all.Rows(e, 1).View({all.shape[1], all.shape[2]}));
  return parts;
}

struct Sizes {
  const char* name;
  int64_t tokens, experts, k, hidden, ffn;
};

void BenchExperts(Bench* bench, const Sizes& z) {
  bench->Reset();
  const Context& context = bench->context();
  const int64_t rows_count = z.tokens * z.k;
  const auto named = [&](const char* what) { return std::string(z.name) + " " + what; };
  const RouterOptions options{.score = RouterScore::kSoftmax, .topk = z.k};
  const Tensor logits = bench->Normal(kF32, {z.tokens, z.experts}), scores = bench->Empty(kF32, {z.tokens, z.experts});
  const Tensor experts = bench->Empty(kI32, {z.tokens, z.k}), probabilities = bench->Empty(kF32, {z.tokens, z.k});
  const Tensor d_probabilities = bench->Normal(kF32, {z.tokens, z.k}), d_logits = bench->Empty(kF32, {z.tokens, z.experts});
  const ExpertRows rows{bench->Empty(kI32, {z.experts + 1}), bench->Empty(kI32, {rows_count}), bench->Empty(kI32, {rows_count})};
  const double of_logits = 4.0 * static_cast<double>(z.tokens * z.experts);
  bench->Traffic(named("router forward"), 2 * of_logits,
                 [&] { RouterForward(context, logits, {}, options, scores, experts, probabilities); });
  bench->Traffic(named("router backward"), 3 * of_logits,
                 [&] { RouterBackward(context, d_probabilities, logits, scores, experts, options, {}, d_logits); });
  bench->Traffic(named("sort by expert"), 12.0 * static_cast<double>(rows_count), [&] { SortByExpert(context, experts, rows); });

  const Tensor x = bench->Normal(kBF16, {z.tokens, z.hidden}), sorted = bench->Empty(kBF16, {rows_count, z.hidden});
  const Tensor fc1 = bench->Normal(kBF16, {z.experts, 2 * z.ffn, z.hidden}),
               fc2 = bench->Normal(kBF16, {z.experts, z.hidden, z.ffn});
  const Tensor fc1_grad = bench->Empty(kF32, fc1.shape), fc2_grad = bench->Empty(kF32, fc2.shape);
  const Tensor wide = bench->Empty(kBF16, {rows_count, 2 * z.ffn}), d_wide = bench->Normal(kBF16, {rows_count, 2 * z.ffn});
  const Tensor narrow = bench->Empty(kBF16, {rows_count, z.ffn}), d_narrow = bench->Normal(kBF16, {rows_count, z.ffn});
  const auto token_bytes = 2.0 * static_cast<double>(z.tokens * z.hidden), row_bytes = token_bytes * static_cast<double>(z.k);
  bench->Traffic(named("gather rows"), token_bytes + row_bytes, [&] { GatherRows(context, x, rows, sorted); });
  bench->Traffic(named("sum rows"), token_bytes + row_bytes, [&] { SumRows(context, sorted, rows, {}, kBF16, x); });

  const auto fc1_weights = Cut(fc1), fc2_weights = Cut(fc2), fc1_grads = Cut(fc1_grad), fc2_grads = Cut(fc2_grad);
  const double flops = 2.0 * static_cast<double>(rows_count * z.hidden * z.ffn);
  bench->Product(named("fc1 forward"), 2 * flops, [&] { GroupedGemm(context, sorted, fc1_weights, rows.offsets, wide); });
  bench->Product(named("fc1 input gradient"), 2 * flops,
                 [&] { GroupedGemmInputGradient(context, d_wide, fc1_weights, rows.offsets, sorted); });
  bench->Product(named("fc1 weight gradient"), 2 * flops,
                 [&] { GroupedGemmWeightGradient(context, d_wide, sorted, rows.offsets, kF32, fc1_grads, {}); });
  bench->Product(named("fc2 forward"), flops, [&] { GroupedGemm(context, d_narrow, fc2_weights, rows.offsets, sorted); });
  bench->Product(named("fc2 input gradient"), flops,
                 [&] { GroupedGemmInputGradient(context, sorted, fc2_weights, rows.offsets, narrow); });
  bench->Product(named("fc2 weight gradient"), flops,
                 [&] { GroupedGemmWeightGradient(context, sorted, d_narrow, rows.offsets, kF32, fc2_grads, {}); });
  const auto half_bytes = 2.0 * static_cast<double>(rows_count * z.ffn);
  const ExpertActivationOptions activation{.precision = kBF16};
  bench->Traffic(named("activation forward"), 3 * half_bytes,
                 [&] { ExpertActivationForward(context, d_wide, rows, probabilities, activation, narrow); });
  bench->Traffic(named("activation backward"), 5 * half_bytes, [&] {
    ExpertActivationBackward(context, d_narrow, d_wide, rows, probabilities, activation, wide, d_probabilities);
  });
}

void BenchLatentHeads(Bench* bench) {
  bench->Reset();
  constexpr int64_t kS = 4096, kRank = 512;
  const MlaLayout layout{16, 128, 64, 128};
  const Tensor query = bench->Normal(kBF16, {kS, 1, layout.query_width()}), down = bench->Normal(kBF16, {kS, 1, kRank + 64});
  const Tensor key_value = bench->Normal(kBF16, {kS, 1, layout.key_value_width()}),
               qkv = bench->Empty(kBF16, {kS, 1, layout.qkv().width()});
  const Tensor cosine = bench->Normal(kF32, {kS, 32}), sine = bench->Normal(kF32, {kS, 32});
  const double bytes = 2.0 * kS * static_cast<double>(layout.query_width() + layout.key_value_width() + layout.qkv().width());
  bench->Traffic("DeepSeek-V2-Lite heads joined", bytes, [&] {
    MlaJoinHeads(bench->context(), query, key_value, down, cosine, sine, layout, RotaryPairs::kInterleaved, kBF16, qkv);
  });
  bench->Traffic("DeepSeek-V2-Lite heads split", bytes, [&] {
    MlaSplitHeads(bench->context(), qkv, cosine, sine, layout, RotaryPairs::kInterleaved, kBF16, query, key_value, down);
  });
}

int Main() {
  Bench bench;
  BenchExperts(&bench, {"DeepSeek-V2-Lite", 4096, 64, 6, 2048, 1408});
  BenchExperts(&bench, {"Mixtral", 4096, 8, 2, 4096, 14336});
  BenchLatentHeads(&bench);
  return 0;
}

}  // namespace
}  // namespace mbridge

int main() { return mbridge::Main(); }
