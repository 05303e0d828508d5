#include "engine/ops/moe_permute.h"

#include "engine/ops/cuda/expert_tensors.h"

namespace mbridge::cuda {
namespace {

// Slots of one block. The sort is stable: blocks, warps and lanes stand in the order of the slots.
constexpr int kSlots = 256;

// counts [expert, block].
__global__ void __launch_bounds__(kSlots) CountKernel(const int32_t* chosen, int64_t count, int experts, int32_t* counts) {
  __shared__ int32_t own[kMaxExperts];
  for (int e = threadIdx.x; e < experts; e += kSlots) own[e] = 0;
  __syncthreads();
  const int64_t slot = int64_t{blockIdx.x} * kSlots + threadIdx.x;
  if (slot < count) atomicAdd(&own[chosen[slot]], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kSlots) counts[int64_t{e} * gridDim.x + blockIdx.x] = own[e];
}

// One block an expert: its counts become those of the blocks before; totals gets the sum.
__global__ void __launch_bounds__(256) ScanKernel(int32_t* counts, int blocks, int32_t* totals) {
  __shared__ int32_t sums[8];
  int32_t* own = counts + int64_t{blockIdx.x} * blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t before = 0;
  for (int first = 0; first < blocks; first += 256) {
    const int at = first + threadIdx.x;
    const int32_t value = at < blocks ? own[at] : 0;
    int32_t sum = value;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t lower = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += lower;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int32_t earlier = before, all = 0;
    for (int w = 0; w < 8; ++w) {
      if (w < warp) earlier += sums[w];
      all += sums[w];
    }
    if (at < blocks) own[at] = earlier + sum - value;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

__global__ void __launch_bounds__(kSlots) PlaceKernel(const int32_t* chosen, int64_t count, int experts, const int32_t* counts,
                                                      const int32_t* totals, int32_t* offsets, int32_t* slots, int32_t* places) {
  constexpr int kWarps = kSlots / 32;
  __shared__ int32_t starts[kMaxExperts];             // First row of this block's slots of an expert.
  __shared__ uint16_t of_warps[kWarps][kMaxExperts];  // Slots of each warp, then of the warps before it.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 0) {
    int32_t before = 0;
    for (int base = 0; base < experts; base += 32) {
      const int e = base + lane;
      const int32_t total = e < experts ? totals[e] : 0;
      int32_t sum = total;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t lower = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += lower;
      }
      if (e < experts) {
        const int32_t begin = before + sum - total;
        starts[e] = begin + counts[int64_t{e} * gridDim.x + blockIdx.x];
        if (blockIdx.x == 0) offsets[e] = begin;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (blockIdx.x == 0 && lane == 0) offsets[experts] = before;
  }
  for (int i = threadIdx.x; i < kWarps * kMaxExperts; i += kSlots) of_warps[i / kMaxExperts][i % kMaxExperts] = 0;
  __syncthreads();
  const int64_t slot = int64_t{blockIdx.x} * kSlots + threadIdx.x;
  const bool inside = slot < count;
  const int expert = inside ? chosen[slot] : -1;
  const unsigned same = __match_any_sync(0xffffffffu, expert);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (inside && rank == 0) of_warps[warp][expert] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kSlots) {
    int before = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int own = of_warps[w][e];
      of_warps[w][e] = static_cast<uint16_t>(before);
      before += own;
    }
  }
  __syncthreads();
  if (!inside) return;
  const int32_t row = starts[expert] + of_warps[warp][expert] + rank;
  slots[row] = static_cast<int32_t>(slot);
  places[slot] = row;
}

void SortCuda(const Context& context, const Tensor& experts, const ExpertRows& rows) {
  const int64_t count = experts.size(), kinds = rows.offsets.size() - 1;
  if (rows.slots.size() != count || rows.places.size() != count || count == 0 || count > INT32_MAX)
    ThrowEngineError("{} chosen experts for {} rows", count, rows.slots.size());
  if (kinds < 1 || kinds > kMaxExperts) ThrowEngineError("{} experts: 1 to {}", kinds, kMaxExperts);
  const auto blocks = static_cast<int>((count + kSlots - 1) / kSlots), e = static_cast<int>(kinds);
  auto* counts = WorkspaceOf<int32_t>(context, int64_t{blocks} * kinds + kinds);
  int32_t* totals = counts + int64_t{blocks} * kinds;
  const auto* chosen = PointerOf<const int32_t>(experts);
  CountKernel<<<blocks, kSlots, 0, StreamOf(context)>>>(chosen, count, e, counts);
  MB_CUDA_LAUNCHED();
  ScanKernel<<<e, 256, 0, StreamOf(context)>>>(counts, blocks, totals);
  MB_CUDA_LAUNCHED();
  PlaceKernel<<<blocks, kSlots, 0, StreamOf(context)>>>(chosen, count, e, counts, totals, PointerOf<int32_t>(rows.offsets),
                                                        PointerOf<int32_t>(rows.slots), PointerOf<int32_t>(rows.places));
  MB_CUDA_LAUNCHED();
}

__global__ void LoadKernel(const int32_t* offsets, int experts, float* load) {
  for (int e = threadIdx.x; e < experts; e += blockDim.x) load[e] += static_cast<float>(offsets[e + 1] - offsets[e]);
}

void LoadCuda(const Context& context, const ExpertRows& rows, const Tensor& load) {
  LoadKernel<<<1, 256, 0, StreamOf(context)>>>(PointerOf<int32_t>(rows.offsets), static_cast<int>(load.size()),
                                               PointerOf<float>(load));
  MB_CUDA_LAUNCHED();
}

// Bodies of RowsKernel (vectors.h).
struct NoColumns {};

template <class T, int kWidth> struct GatherBody {
  static constexpr int kN = kWidth;
  using Row = Pack<T, kN>;
  const T* x;
  const int32_t* slots;
  T* y;
  int64_t width;
  int k;
  __device__ NoColumns Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const { return LoadPack<kN>(x + slots[row] / k * width + column); }
  __device__ void Finish(const NoColumns&, const Row& loaded, int64_t row, int64_t column) const {
    StorePack(y + row * width + column, loaded);
  }
};

template <class T, int kWidth> struct SumBody {
  static constexpr int kN = kWidth;
  struct Row {
    float sums[kN];
  };
  const T* x;
  const int32_t* places;
  const T* added;
  T* y;
  int64_t width;
  int k;
  __device__ NoColumns Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const {
    Row loaded = {};
#pragma unroll 4
    for (int i = 0; i < k; ++i) {
      float values[kN];
      LoadFloats<kN>(x + places[row * k + i] * width + column, values);
#pragma unroll
      for (int j = 0; j < kN; ++j) loaded.sums[j] += values[j];
    }
    return loaded;
  }
  __device__ void Finish(const NoColumns&, const Row& loaded, int64_t row, int64_t column) const {
    float values[kN];
    if (added != nullptr) LoadFloats<kN>(added + row * width + column, values);
#pragma unroll
    for (int j = 0; j < kN; ++j) values[j] = added == nullptr ? loaded.sums[j] : Round<T>(loaded.sums[j]) + values[j];
    StoreFloats<kN>(y + row * width + column, values);
  }
};

void GatherCuda(const Context& context, const Tensor& x, const ExpertRows& rows, const Tensor& y) {
  const int64_t width = LastDimension(x), tokens = x.size() / width, count = rows.slots.size(), k = count / tokens;
  if (y.size() != count * width || y.dtype != x.dtype)
    ThrowEngineError("rows of {} into {}", x.shape.ToString(), y.shape.ToString());
  WithType(x.dtype, [&]<class T>(T) {
    const auto run = [&]<int kN>(std::integral_constant<int, kN>) {
      LaunchRows<4>(
          context,
          GatherBody<T, kN>{PointerOf<T>(x), PointerOf<int32_t>(rows.slots), PointerOf<T>(y), width, static_cast<int>(k)}, count,
          width);
    };
    if (width % kVectorSize<T> == 0 && AreAligned16(x.data, y.data)) return run(std::integral_constant<int, kVectorSize<T>>());
    run(std::integral_constant<int, 1>());
  });
}

void SumCuda(const Context& context, const Tensor& x, const ExpertRows& rows, const Tensor& added, DType precision,
             const Tensor& y) {
  CheckStorage(y, precision);
  const int64_t width = LastDimension(y), tokens = y.size() / width, k = rows.places.size() / tokens;
  if (x.size() != tokens * k * width || x.dtype != y.dtype || (!added.empty() && added.size() != y.size()))
    ThrowEngineError("sums of {} rows of {} into {}", k, x.shape.ToString(), y.shape.ToString());
  WithType(y.dtype, [&]<class T>(T) {
    const auto run = [&]<int kN>(std::integral_constant<int, kN>) {
      LaunchRows<1>(context,
                    SumBody<T, kN>{PointerOf<T>(x), PointerOf<int32_t>(rows.places), PointerOf<T>(added), PointerOf<T>(y), width,
                                   static_cast<int>(k)},
                    tokens, width);
    };
    const bool vectors = width % kVectorSize<T> == 0 && AreAligned16(x.data, added.data, y.data);
    if (vectors) return run(std::integral_constant<int, kVectorSize<T>>());
    run(std::integral_constant<int, 1>());
  });
}

const bool g_registered =
    (SortByExpert.cuda = &SortCuda, AddExpertLoad.cuda = &LoadCuda, GatherRows.cuda = &GatherCuda, SumRows.cuda = &SumCuda, true);

}  // namespace
}  // namespace mbridge::cuda
