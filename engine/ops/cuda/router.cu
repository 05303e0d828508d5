// A warp routes a token: lane l holds experts l, l + 32, ... Sums over the chosen run in the order of the choice, as the CPU's
// do.
#include "engine/ops/router.h"

#include "engine/ops/cuda/expert_tensors.h"

namespace mbridge::cuda {
namespace {

constexpr float kTiny = 1e-20f;  // Megatron-Core's guard of the division by a sum of sigmoids.
constexpr int kWarps = 8;        // Of a block.
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % 32); }

// What a lane holds of a row of `count` values.
template <int kPer> struct Row {
  float values[kPer];
  __device__ __forceinline__ static int At(int i) { return Lane() + 32 * i; }
  template <class F> __device__ __forceinline__ void Set(int count, float outside, F&& f) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) values[i] = At(i) < count ? f(At(i)) : outside;
  }
  // Value of an index, in every lane.
  __device__ __forceinline__ float Get(int index) const {
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) value = i == index / 32 ? values[i] : value;
    return __shfl_sync(kAll, value, index % 32);
  }
  __device__ __forceinline__ void Put(int index, float value) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (At(i) == index) values[i] = value;
    }
  }
  __device__ __forceinline__ float Sum() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += values[i];
    return WarpSum(sum);
  }
  // Softmax in place (outside: -infinity); the logarithmic normaliser.
  __device__ __forceinline__ float Softmax() {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPer; ++i) largest = fmaxf(largest, values[i]);
    largest = WarpMax(largest);
#pragma unroll
    for (int i = 0; i < kPer; ++i) values[i] = expf(values[i] - largest);
    const float sum = Sum();
#pragma unroll
    for (int i = 0; i < kPer; ++i) values[i] /= sum;
    return largest + logf(sum);
  }
};

// The k largest of `count` keys, best first, the lower index of equals first; visit(i, index, key) in every lane. `allowed`, by
// bits of the lane's values. Whatever the keys are, indices lie in range and differ.
template <int kPer, class Visit>
__device__ __forceinline__ void TopK(const Row<kPer>& keys, int count, int k, unsigned allowed, Visit&& visit) {
  for (int turn = 0; turn < k; ++turn) {
    int best = -1;
    float key = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (Row<kPer>::At(i) >= count || (allowed >> i & 1) == 0) continue;
      if (best < 0 || keys.values[i] > key) best = Row<kPer>::At(i), key = keys.values[i];
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      const int other = __shfl_xor_sync(kAll, best, offset);
      const float other_key = __shfl_xor_sync(kAll, key, offset);
      if (other >= 0 && (best < 0 || other_key > key || (other_key == key && other < best))) best = other, key = other_key;
    }
    best = __shfl_sync(kAll, best, 0);  // Lanes may differ over keys that are not numbers.
    key = __shfl_sync(kAll, key, 0);
    if (best % 32 == Lane()) allowed &= ~(1u << best / 32);
    visit(turn, best, key);
  }
}

// Keys outside the best groups become -infinity.
template <int kPer> __device__ void LimitToGroups(const RouterOptions& o, int count, Row<kPer>* keys) {
  if (o.groups <= 1 || o.group_topk >= o.groups) return;
  const int groups = static_cast<int>(o.groups), size = count / groups;
  Row<kPer> sums;
  sums.Set(0, 0.0f, [](int) { return 0.0f; });
  for (int g = 0; g < groups; ++g) {
    unsigned members = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) members |= (Row<kPer>::At(i) / size == g ? 1u : 0u) << i;
    float sum = 0.0f;
    TopK(*keys, count, static_cast<int>(o.group_experts), members, [&](int, int, float key) { sum += key; });
    sums.Put(g, sum);
  }
  unsigned kept = 0;
  TopK(sums, groups, static_cast<int>(o.group_topk), ~0u, [&](int, int group, float) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) kept |= (Row<kPer>::At(i) / size == group ? 1u : 0u) << i;
  });
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if ((kept >> i & 1) == 0) keys->values[i] = -INFINITY;
  }
}

// Softmax over the k values that lanes 0 .. k - 1 hold.
__device__ __forceinline__ float SoftmaxOfLanes(float value, int k) {
  float largest = -INFINITY, sum = 0.0f;
  for (int i = 0; i < k; ++i) largest = fmaxf(largest, __shfl_sync(kAll, value, i));
  const float e = expf(value - largest);
  for (int i = 0; i < k; ++i) sum += __shfl_sync(kAll, e, i);
  return e / sum;
}
__device__ __forceinline__ float SumOfLanes(float value, int k, float sum = 0.0f) {
  for (int i = 0; i < k; ++i) sum += __shfl_sync(kAll, value, i);
  return sum;
}

template <int kPer>
__global__ void __launch_bounds__(32 * kWarps)
    ForwardKernel(const float* logits, const float* bias, const RouterOptions o, int64_t tokens, int count, float* scores,
                  int32_t* experts, float* probabilities) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  const int k = static_cast<int>(o.topk);
  const bool of_logits = o.score == RouterScore::kSoftmaxOfChosen;
  Row<kPer> logit, score, keys;
  logit.Set(count, -INFINITY, [&](int e) { return RoundTo(o.precision, logits[token * count + e]); });
  score = logit;
  if (o.score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) score.values[i] = Row<kPer>::At(i) < count ? Sigmoid<float>(logit.values[i]) : 0.0f;
  } else {
    score.Softmax();
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = Row<kPer>::At(i);
    keys.values[i] = of_logits ? logit.values[i] : RoundTo(o.precision, score.values[i]);
    if (e >= count) continue;
    scores[token * count + e] = score.values[i];
    if (bias != nullptr) keys.values[i] += bias[e];
  }
  LimitToGroups(o, count, &keys);
  int mine = 0;
  TopK(keys, count, k, ~0u, [&](int turn, int expert, float) { mine = turn == Lane() ? expert : mine; });
  float p = 0.0f;
  for (int i = 0; i < k; ++i) {
    const int expert = __shfl_sync(kAll, mine, i);
    const float value = of_logits ? logit.Get(expert) : RoundTo(o.precision, score.Get(expert));
    if (i == Lane()) p = value;
  }
  if (of_logits) p = SoftmaxOfLanes(p, k);
  if (o.score == RouterScore::kSigmoid && k > 1) {
    p /= RoundTo(o.precision, RoundTo(o.precision, SumOfLanes(p, k)) + kTiny);
  }
  if (Lane() >= k) return;
  experts[token * k + Lane()] = mine;
  probabilities[token * k + Lane()] = RoundTo(o.precision, RoundTo(o.precision, p) * o.scaling);
}

// slopes[e] of score[e] becomes that of the logit, through a softmax.
template <int kPer> __device__ __forceinline__ void SoftmaxBackward(const Row<kPer>& score, Row<kPer>* slope) {
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) dot += slope->values[i] * score.values[i];
  dot = WarpSum(dot);
#pragma unroll
  for (int i = 0; i < kPer; ++i) slope->values[i] = score.values[i] * (slope->values[i] - dot);
}

// The gradient through the probabilities, not rounded yet.
template <int kPer>
__device__ void ChoiceGradient(const RouterOptions& o, const Row<kPer>& logit, const Row<kPer>& score, int chosen, float slope,
                               Row<kPer>* gradient) {
  const int k = static_cast<int>(o.topk);
  float of_chosen = 0.0f;  // Logit or score of this lane's choice.
  for (int i = 0; i < k; ++i) {
    const int expert = __shfl_sync(kAll, chosen, i);
    const float value = o.score == RouterScore::kSoftmaxOfChosen ? logit.Get(expert) : score.Get(expert);
    if (i == Lane()) of_chosen = value;
  }
  if (o.score == RouterScore::kSoftmaxOfChosen) {
    const float p = SoftmaxOfLanes(of_chosen, k);
    slope = p * (slope - SumOfLanes(slope * p, k));
  } else if (o.score == RouterScore::kSigmoid) {
    const float sum = SumOfLanes(of_chosen, k, kTiny), dot = SumOfLanes(slope * of_chosen / sum, k);
    slope = (k > 1 ? (slope - dot) / sum : slope) * of_chosen * (1.0f - of_chosen);
  }
  gradient->Set(0, 0.0f, [](int) { return 0.0f; });
  for (int i = 0; i < k; ++i) gradient->Put(__shfl_sync(kAll, chosen, i), __shfl_sync(kAll, slope, i));
  if (o.score == RouterScore::kSoftmax) SoftmaxBackward(score, gradient);
}

template <int kPer>
__global__ void __launch_bounds__(32 * kWarps)
    BackwardKernel(const float* d_probabilities, const float* logits, const float* scores, const int32_t* experts,
                   const RouterOptions o, const float* slopes, int64_t sequences, float z_slope, int64_t tokens, int count,
                   float* d_logits) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  const int k = static_cast<int>(o.topk);
  Row<kPer> logit, score, gradient;
  logit.Set(count, -INFINITY, [&](int e) { return RoundTo(o.precision, logits[token * count + e]); });
  score.Set(count, 0.0f, [&](int e) { return scores[token * count + e]; });
  const bool has = Lane() < k;
  const int chosen = has ? experts[token * k + Lane()] : 0;
  const float slope = has ? RoundTo(o.precision, d_probabilities[token * k + Lane()] * o.scaling) : 0.0f;
  ChoiceGradient(o, logit, score, chosen, slope, &gradient);
#pragma unroll
  for (int i = 0; i < kPer; ++i) gradient.values[i] = RoundTo(o.precision, gradient.values[i]);
  if (slopes != nullptr) {
    Row<kPer> extra;
    extra.Set(count, 0.0f, [&](int e) { return slopes[token % sequences * count + e]; });
    if (o.score == RouterScore::kSigmoid) {
      const float sum = kTiny + score.Sum();
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kPer; ++i) dot += extra.values[i] * score.values[i] / sum;
      dot = WarpSum(dot);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const float s = score.values[i];
        extra.values[i] = (extra.values[i] - dot) / sum * s * (1.0f - s);
      }
    } else {
      SoftmaxBackward(score, &extra);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) gradient.values[i] += RoundTo(o.precision, extra.values[i]);
  }
  if (z_slope != 0.0f) {
    const float factor = logit.Softmax() * z_slope;
#pragma unroll
    for (int i = 0; i < kPer; ++i) gradient.values[i] += RoundTo(o.precision, factor * logit.values[i]);
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (Row<kPer>::At(i) < count) d_logits[token * count + Row<kPer>::At(i)] = RoundTo(o.precision, gradient.values[i]);
  }
}

// Block (chunk, sequence): for its tokens the sums of normalised scores and the times that each expert is among the k best,
// sums and times [chunk, sequence, expert].
template <int kPer>
__global__ void __launch_bounds__(32 * kWarps) BalanceKernel(const float* scores, const RouterOptions o, int64_t length,
                                                             int64_t per_chunk, int count, double* sums, int32_t* times) {
  __shared__ double block_sums[32 * kPer];
  __shared__ int32_t block_times[32 * kPer];
  const int64_t sequences = gridDim.y, begin = int64_t{blockIdx.x} * per_chunk, end = min(begin + per_chunk, length);
  const int warp = threadIdx.x / 32;
  double sum[kPer] = {};
  int32_t time[kPer] = {};
  for (int64_t place = begin + warp; place < end; place += kWarps) {
    const int64_t token = place * sequences + blockIdx.y;
    Row<kPer> score;
    score.Set(count, 0.0f, [&](int e) { return scores[token * count + e]; });
    const float total = o.score == RouterScore::kSigmoid ? kTiny + score.Sum() : 1.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum[i] += static_cast<double>(score.values[i]) / total;
    TopK(score, count, static_cast<int>(o.topk), ~0u, [&](int, int expert, float) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) time[i] += Row<kPer>::At(i) == expert ? 1 : 0;
    });
  }
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int e = Row<kPer>::At(i);
        block_sums[e] = turn == 0 ? sum[i] : block_sums[e] + sum[i];
        block_times[e] = turn == 0 ? time[i] : block_times[e] + time[i];
      }
    }
    __syncthreads();
  }
  const int64_t to = (int64_t{blockIdx.x} * sequences + blockIdx.y) * count;
  for (int e = threadIdx.x; e < count; e += blockDim.x) {
    sums[to + e] = block_sums[e];
    times[to + e] = block_times[e];
  }
}

__global__ void __launch_bounds__(512)
    FinishBalanceKernel(const double* sums, const int32_t* times, int64_t chunks, int64_t values, double factor, float scale,
                        float* loss, float* slopes) {
  __shared__ double shared[512];
  double mine = 0;
  for (int64_t i = threadIdx.x; i < values; i += 512) {
    double sum = 0;
    int64_t time = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      sum += sums[chunk * values + i];
      time += times[chunk * values + i];
    }
    mine += factor * static_cast<double>(time) * sum;
    slopes[i] = static_cast<float>(scale * factor * static_cast<double>(time));
  }
  shared[threadIdx.x] = mine;
  for (int half = 256; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) loss[0] += static_cast<float>(shared[0]);
}

// One thread sums the loads in the CPU's order: whether a load equals the mean decides a sign.
__global__ void UpdateBiasKernel(const float* loads, int count, float rate, float* bias) {
  __shared__ double mean;
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int e = 0; e < count; ++e) sum += loads[e] / static_cast<double>(count);
    mean = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < count; e += blockDim.x) {
    const double missing = mean - loads[e];
    bias[e] += missing > 0 ? rate : missing < 0 ? -rate : 0.0f;
  }
}

void CheckRouter(int64_t experts, const RouterOptions& o) {
  const bool groups_fit =
      o.groups <= 1 || (experts % o.groups == 0 && o.group_topk >= 1 && o.group_experts >= 1 &&
                        o.group_experts <= experts / o.groups && o.topk <= experts / o.groups * std::min(o.group_topk, o.groups));
  if (o.topk >= 1 && o.topk <= std::min<int64_t>(experts, 32) && experts <= kMaxExperts && groups_fit) return;
  ThrowEngineError("router on CUDA of {} experts (up to {}): {} a token (up to 32), {} of {} groups by their {} best", experts,
                   kMaxExperts, o.topk, o.group_topk, o.groups, o.group_experts);
}

// f(std::integral_constant<int, kPer>()).
template <class F> void WithLaneShare(int64_t experts, F&& f) {
  if (experts <= 32) return f(std::integral_constant<int, 1>());
  if (experts <= 64) return f(std::integral_constant<int, 2>());
  if (experts <= 128) return f(std::integral_constant<int, 4>());
  if (experts <= 256) return f(std::integral_constant<int, 8>());
  f(std::integral_constant<int, kMaxExperts / 32>());
}

unsigned BlocksFor(int64_t tokens) { return static_cast<unsigned>((tokens + kWarps - 1) / kWarps); }

void ForwardCuda(const Context& context, const Tensor& logits, const Tensor& bias, const RouterOptions& o, const Tensor& scores,
                 const Tensor& experts, const Tensor& probabilities) {
  const int64_t tokens = logits.shape[0], count = logits.shape[1];
  CheckRouter(count, o);
  if (tokens == 0) return;
  WithLaneShare(count, [&]<int kPer>(std::integral_constant<int, kPer>) {
    ForwardKernel<kPer><<<BlocksFor(tokens), 32 * kWarps, 0, StreamOf(context)>>>(
        PointerOf<float>(logits), PointerOf<float>(bias), o, tokens, static_cast<int>(count), PointerOf<float>(scores),
        PointerOf<int32_t>(experts), PointerOf<float>(probabilities));
  });
  MB_CUDA_LAUNCHED();
}

void BackwardCuda(const Context& context, const Tensor& d_probabilities, const Tensor& logits, const Tensor& scores,
                  const Tensor& experts, const RouterOptions& o, const RouterAuxiliary& auxiliary, const Tensor& d_logits) {
  const int64_t tokens = logits.shape[0], count = logits.shape[1];
  CheckRouter(count, o);
  if (tokens == 0) return;
  const int64_t sequences = auxiliary.slopes.empty() ? 1 : auxiliary.slopes.shape[0];
  WithLaneShare(count, [&]<int kPer>(std::integral_constant<int, kPer>) {
    BackwardKernel<kPer><<<BlocksFor(tokens), 32 * kWarps, 0, StreamOf(context)>>>(
        PointerOf<float>(d_probabilities), PointerOf<float>(logits), PointerOf<float>(scores), PointerOf<int32_t>(experts), o,
        PointerOf<float>(auxiliary.slopes), sequences, auxiliary.z_slope, tokens, static_cast<int>(count),
        PointerOf<float>(d_logits));
  });
  MB_CUDA_LAUNCHED();
}

void BalanceCuda(const Context& context, const Tensor& scores, const RouterOptions& o, float coefficient, float scale,
                 const Tensor& loss, const Tensor& slopes) {
  const int64_t tokens = scores.shape[0], count = scores.shape[1], sequences = slopes.shape[0], length = tokens / sequences;
  CheckRouter(count, o);
  int64_t chunks = std::clamp<int64_t>(length / 64, 1, 128);
  const int64_t per_chunk = (length + chunks - 1) / chunks, values = sequences * count;
  chunks = (length + per_chunk - 1) / per_chunk;
  auto* sums = WorkspaceOf<double>(context, chunks * values * 2);  // Sums, then the times.
  auto* times = reinterpret_cast<int32_t*>(sums + chunks * values);
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(sequences));
  WithLaneShare(count, [&]<int kPer>(std::integral_constant<int, kPer>) {
    BalanceKernel<kPer><<<grid, 32 * kWarps, 0, StreamOf(context)>>>(PointerOf<float>(scores), o, length, per_chunk,
                                                                     static_cast<int>(count), sums, times);
  });
  MB_CUDA_LAUNCHED();
  const auto n = static_cast<double>(length);
  const double factor =
      coefficient * static_cast<double>(count) / (static_cast<double>(o.topk) * n * n * static_cast<double>(sequences));
  FinishBalanceKernel<<<1, 512, 0, StreamOf(context)>>>(sums, times, chunks, values, factor, scale, PointerOf<float>(loss),
                                                        PointerOf<float>(slopes));
  MB_CUDA_LAUNCHED();
}

void UpdateBiasCuda(const Context& context, const Tensor& load, float rate, const Tensor& bias) {
  UpdateBiasKernel<<<1, 256, 0, StreamOf(context)>>>(PointerOf<float>(load), static_cast<int>(load.size()), rate,
                                                     PointerOf<float>(bias));
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (RouterForward.cuda = &ForwardCuda, RouterBackward.cuda = &BackwardCuda,
                           RouterBalanceLoss.cuda = &BalanceCuda, UpdateExpertBias.cuda = &UpdateBiasCuda, true);

}  // namespace
}  // namespace mbridge::cuda
