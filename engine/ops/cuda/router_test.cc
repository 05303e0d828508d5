#include "engine/ops/router.h"

#include "engine/ops/cuda/twin_test.h"

namespace mbridge::test {
namespace {

struct Problem {
  int64_t tokens, experts;
  RouterOptions options;
  bool bias = false;
};

const Problem kSmall[] = {
    {1, 2, {.score = RouterScore::kSoftmaxOfChosen, .topk = 1}},
    {13, 8, {.score = RouterScore::kSoftmaxOfChosen, .topk = 2, .scaling = 2.5f}},
    {9, 8, {.score = RouterScore::kSoftmaxOfChosen, .topk = 8}},
    {17, 33, {.score = RouterScore::kSoftmax, .topk = 4}},
    {11, 24, {.score = RouterScore::kSoftmax, .topk = 3, .groups = 4, .group_topk = 2, .group_experts = 1, .scaling = 16.0f}},
    {10, 12, {.score = RouterScore::kSigmoid, .topk = 1}, true},
    {19,
     32,
     {.score = RouterScore::kSigmoid, .topk = 6, .groups = 8, .group_topk = 4, .group_experts = 2, .scaling = 2.5f},
     true},
};
const Problem kLarge[] = {
    {1031, 64, {.score = RouterScore::kSoftmax, .topk = 6}},
    {515, 128, {.score = RouterScore::kSoftmaxOfChosen, .topk = 8}},
    {700,
     256,
     {.score = RouterScore::kSigmoid, .topk = 8, .groups = 8, .group_topk = 4, .group_experts = 2, .scaling = 2.5f},
     true},
    {97, 512, {.score = RouterScore::kSoftmax, .topk = 10}},
};

// Scores that are a rounding apart may be chosen differently by functions that differ in the last bit: equal but for this share.
constexpr double kDifferentChoices = 0.005;

void ExpectTwinsAgree(const Gpu& gpu, const Problem& problem, DType precision) {
  RouterOptions o = problem.options;
  o.precision = precision;
  const int64_t tokens = problem.tokens, count = problem.experts, k = o.topk;
  SCOPED_TRACE(fmt::format("{} {} of {} experts, score {}", NameOf(precision), k, count, static_cast<int>(o.score)));
  const Twin logits(DType::kF32, {tokens, count}, RandomValues(tokens * count, 1, 3.0, DType::kF32));
  const Twin bias(DType::kF32, {count}, RandomValues(count, 2, 0.2, DType::kF32));
  const Owned scores(DType::kF32, {tokens, count}), experts(DType::kI32, {tokens, k}), p(DType::kF32, {tokens, k});
  const OnGpu gpu_scores(DType::kF32, {tokens, count}), gpu_experts(DType::kI32, {tokens, k}), gpu_p(DType::kF32, {tokens, k});
  RouterForward.cpu({}, logits.cpu, problem.bias ? bias.cpu.tensor() : Tensor(), o, scores, experts, p);
  RouterForward(gpu, logits.gpu, problem.bias ? bias.gpu.tensor() : Tensor(), o, gpu_scores, gpu_experts, gpu_p);
  ExpectNear(gpu_scores.ToValues(), scores.ToValues(), 4e-6, 1e-9);
  const Values chosen = experts.ToValues(), gpu_chosen = gpu_experts.ToValues();
  int64_t different = 0;
  for (size_t i = 0; i < chosen.size(); ++i) different += chosen[i] != gpu_chosen[i];
  EXPECT_LE(different, kDifferentChoices * chosen.size()) << "choices";
  if (different == 0) ExpectNear(gpu_p.ToValues(), p.ToValues(), StepOf(precision), 1e-7);

  // Backward from the same choice.
  const Twin same_scores(DType::kF32, {tokens, count}, scores.ToValues()), d_p(DType::kF32, {tokens, k}, 3);
  const OnGpu same_experts(DType::kI32, {tokens, k}, chosen);
  for (const int64_t sequences : {1, 2}) {
    const Twin slopes(DType::kF32, {sequences, count}, 4);
    const Owned d_logits(DType::kF32, {tokens, count});
    const OnGpu gpu_d_logits(DType::kF32, {tokens, count});
    RouterAuxiliary auxiliary, gpu_auxiliary;
    if (sequences == 2) auxiliary = {slopes.cpu, 0.25f}, gpu_auxiliary = {slopes.gpu, 0.25f};
    RouterBackward.cpu({}, d_p.cpu, logits.cpu, scores, experts, o, auxiliary, d_logits);
    RouterBackward(gpu, d_p.gpu, logits.gpu, same_scores.gpu, same_experts, o, gpu_auxiliary, gpu_d_logits);
    // Sums of terms of about the largest gradient, which cancel; each is rounded to the precision.
    double largest = 0;
    for (const double x : d_logits.ToValues()) largest = std::max(largest, std::fabs(x));
    ExpectNear(gpu_d_logits.ToValues(), d_logits.ToValues(), 2 * StepOf(precision), StepOf(precision) * largest);
  }
}

TEST(RouterCuda, SmallProblemsNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Problem& problem : kSmall) {
    for (const DType precision : kGpuTypes) ExpectTwinsAgree(gpu, problem, precision);
  }
}

TEST(RouterCuda, NearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Problem& problem : kLarge) {
    for (const DType precision : {DType::kF32, DType::kBF16}) ExpectTwinsAgree(gpu, problem, precision);
  }
}

TEST(RouterCuda, EqualScoresTakeTheLowerIndexAndNansStayInRange) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kCount = 40;
  Values values(2 * kCount, 1.0);
  values[39] = 2.0;
  std::fill(values.begin() + kCount, values.end(), NAN);
  const OnGpu logits(DType::kF32, {2, kCount}, values), scores(DType::kF32, {2, kCount}), experts(DType::kI32, {2, 4}),
      p(DType::kF32, {2, 4});
  RouterForward(gpu, logits, {}, {.topk = 4}, scores, experts, p);
  Values chosen = experts.ToValues();
  EXPECT_EQ(Values(chosen.begin(), chosen.begin() + 4), (Values{39, 0, 1, 2}));
  std::sort(chosen.begin() + 4, chosen.end());
  for (int i = 4; i < 8; ++i) {
    EXPECT_GE(chosen[i], 0);
    EXPECT_LT(chosen[i], kCount);
    if (i > 4) {
      EXPECT_LT(chosen[i - 1], chosen[i]);
    }
  }
}

TEST(RouterCuda, SmallBalanceLossNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const auto& [tokens, experts, sequences] : {std::array<int64_t, 3>{6, 4, 1}, {60, 40, 3}, {4096, 64, 2}}) {
    for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
      SCOPED_TRACE(fmt::format("{} tokens, {} experts, {} sequences", tokens, experts, sequences));
      const RouterOptions o{.score = score, .topk = 3};
      Values values = RandomValues(tokens * experts, 5, 0.5, DType::kF32);
      for (double& x : values) x = RoundTo(DType::kF32, x + 0.5);
      const Twin scores(DType::kF32, {tokens, experts}, values), loss(DType::kF32, {1}, Values{0.25});
      const Owned slopes(DType::kF32, {sequences, experts});
      const OnGpu gpu_slopes(DType::kF32, {sequences, experts});
      RouterBalanceLoss.cpu({}, scores.cpu, o, 0.01f, 0.5f, loss.cpu, slopes);
      RouterBalanceLoss(gpu, scores.gpu, o, 0.01f, 0.5f, loss.gpu, gpu_slopes);
      EXPECT_EQ(gpu_slopes.ToValues(), slopes.ToValues());
      ExpectNear(loss.gpu.ToValues(), loss.cpu.ToValues(), 1e-6, 0);
    }
  }
}

TEST(RouterCuda, SmallExpertBiasEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const int64_t count : {3, 8, 300}) {
    const Twin load(DType::kF32, {count}, RandomInts(count, 6, 4)), bias(DType::kF32, {count}, 7);
    UpdateExpertBias.cpu({}, load.cpu, 0.001f, bias.cpu);
    UpdateExpertBias(gpu, load.gpu, 0.001f, bias.gpu);
    EXPECT_EQ(bias.gpu.ToValues(), bias.cpu.ToValues());
  }
}

TEST(RouterCuda, RefusesWhatItHasNoRoomFor) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const OnGpu logits(DType::kF32, {1, 600}, Values(600)), experts(DType::kI32, {1, 40}), p(DType::kF32, {1, 40});
  EXPECT_THROW(RouterForward(gpu, logits, {}, {.topk = 2}, logits, experts, p), EngineError);
  const OnGpu fewer(DType::kF32, {1, 64}, Values(64));
  EXPECT_THROW(RouterForward(gpu, fewer, {}, {.topk = 33}, fewer, experts, p), EngineError);
}

}  // namespace
}  // namespace mbridge::test
