// Grouped products with the experts' row counts left on the device: a grid for the most tiles that the rows can make, whose
// surplus blocks end at once. No library call takes such counts, and a copy of them to the host would stop the stream.
#include "engine/ops/grouped_gemm.h"

#include "engine/ops/cuda/async_copy.h"
#include "engine/ops/cuda/expert_tensors.h"
#include "engine/ops/cuda/tensor_core.h"
#include "engine/ops/cuda/warpgroup_products.h"

namespace mbridge::cuda {
namespace {

enum class Product : uint8_t {
  kForward,         // c[r, n] = sum over k of a[r, k] b_e[n, k].
  kInputGradient,   // c[r, n] = sum over k of a[r, k] b_e[k, n].
  kWeightGradient,  // c_e[m, n] += sum over rows r of a[r, m] b[r, n].
};

// Rows of a (and of c or b) are the experts' one after another; tensors of an expert stand `stride` elements apart.
template <class T> struct Problem {
  const T *a, *b;
  T* c;            // Of the first two products.
  float* grads;    // Of the third.
  int64_t stride;  // Of b_e, or of c_e.
  const int32_t* offsets;
  int experts;
  int m, n, k;  // m: rows of all experts, or c_e's; k: of the first two.
  DType precision;
};

// What one block computes: rows [begin, end) of an expert and columns from `column`; of a weight gradient all of an expert's rows
// and c_e's rows from `row`.
struct Tile {
  int expert, begin, end, row, column;
};

template <Product kProduct, int kRows, int kColumns, class T> __device__ Tile FindTile(const Problem<T>& p) {
  Tile tile{-1, 0, 0, 0, static_cast<int>(blockIdx.x) * kColumns};
  if constexpr (kProduct == Product::kWeightGradient) {
    const int begin = p.offsets[blockIdx.z], end = p.offsets[blockIdx.z + 1];
    if (end > begin) tile = {static_cast<int>(blockIdx.z), begin, end, static_cast<int>(blockIdx.y) * kRows, tile.column};
    return tile;
  }
  const RowTile rows = FindRowTile(p.offsets, p.experts, static_cast<int>(blockIdx.y), kRows);
  return {rows.expert, rows.begin, rows.end, 0, tile.column};
}

// Adds one result to where it belongs; `row` counts from the tile's first.
template <Product kProduct, class T>
__device__ __forceinline__ void Put(const Problem<T>& p, const Tile& tile, int row, int column, float value) {
  if constexpr (kProduct == Product::kWeightGradient) {
    if (tile.row + row >= p.m || column >= p.n) return;
    p.grads[tile.expert * p.stride + int64_t{tile.row + row} * p.n + column] += RoundTo(p.precision, value);
  } else {
    if (tile.begin + row >= tile.end || column >= p.n) return;
    p.c[int64_t{tile.begin + row} * p.n + column] = Narrow<T>(value);
  }
}

// Any shape and type: 64 x 64 results a block, 4 x 4 a thread, sums in F32 in the order of k.
constexpr int kPlainTile = 64, kPlainDepth = 16;

template <Product kProduct, class T> __global__ void __launch_bounds__(256) PlainKernel(const Problem<T> p) {
  __shared__ float left[kPlainDepth][kPlainTile + 1], right[kPlainDepth][kPlainTile + 1];
  const Tile tile = FindTile<kProduct, kPlainTile, kPlainTile>(p);
  if (tile.expert < 0) return;
  constexpr bool kWeights = kProduct == Product::kWeightGradient;
  const int depth = kWeights ? tile.end - tile.begin : p.k;
  const T* b = kWeights ? p.b : p.b + tile.expert * p.stride;
  const auto a_at = [&](int row, int k) -> float {  // `row` from the tile's first.
    if constexpr (kWeights) return tile.row + row < p.m ? Widen(p.a[int64_t{tile.begin + k} * p.m + tile.row + row]) : 0.0f;
    return tile.begin + row < tile.end ? Widen(p.a[int64_t{tile.begin + row} * p.k + k]) : 0.0f;
  };
  const auto b_at = [&](int column, int k) -> float {
    if (column >= p.n) return 0.0f;
    if constexpr (kProduct == Product::kForward) return Widen(b[int64_t{column} * p.k + k]);
    return Widen(b[(kWeights ? int64_t{tile.begin + k} : int64_t{k}) * p.n + column]);
  };
  float sums[4][4] = {};
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int first = 0; first < depth; first += kPlainDepth) {
    for (int i = threadIdx.x; i < kPlainDepth * kPlainTile; i += 256) {
      const int at = i / kPlainDepth, k = i % kPlainDepth;
      left[k][at] = first + k < depth ? a_at(at, first + k) : 0.0f;
      right[k][at] = first + k < depth ? b_at(tile.column + at, first + k) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPlainDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += left[k][ty * 4 + i] * right[k][tx * 4 + j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) Put<kProduct>(p, tile, ty * 4 + i, tile.column + tx * 4 + j, sums[i][j]);
  }
}

// 16-bit types, widths that are multiples of 8: 128 x 128 results a block by 8 warps through tensor cores; tiles of 64 deep pass
// through a ring in shared memory.
constexpr int kTile = 128, kDepth = 64, kStages = 3;
constexpr int kOperandBytes = kTile * kDepth * 2, kSharedBytes = 2 * kOperandBytes * kStages;

// An operand's tile in shared memory: lines of eight 16-byte chunks, permuted so that eight lines' chunks lie in different banks.
// Deep lines are a row's 64 values along k; flat ones hold 64 rows at one k, first those of all k for rows 0 .. 63, then for rows
// 64 .. 127.
template <bool kFlat> struct OperandTile {
  static constexpr int kChunks = kFlat ? kTile / 8 : kDepth / 8, kLines = kFlat ? kDepth : kTile;
  static constexpr int kBlockBytes = kLines * 128;
  static __device__ __forceinline__ uint32_t At(uint32_t base, int line, int chunk) {
    return base + chunk / 8 * kBlockBytes + line * 128 + (chunk % 8 ^ (line & 7)) * 16;
  }
  // Of rows from 64 `block` on at k from `k` on.
  static __device__ __forceinline__ uint32_t Part(uint32_t base, int block, int k) {
    return kFlat ? base + block * kBlockBytes + k * 128 : base + block * 64 * 128 + k * 2;
  }
  // `from`: element (0, 0) of the tile in memory, lines `pitch` elements apart; beyond `lines` and `chunks` are zeros.
  template <class T>
  static __device__ __forceinline__ void Load(uint32_t base, const T* from, int64_t pitch, int lines, int chunks) {
#pragma unroll
    for (int i = 0; i < kChunks * kLines / 256; ++i) {
      const int index = threadIdx.x + i * 256, line = index / kChunks, chunk = index % kChunks;
      const bool inside = line < lines && chunk < chunks;
      CopyAsync16(At(base, line, chunk), inside ? from + line * pitch + chunk * 8 : from, inside);
    }
  }
};

#ifdef MB_WARPGROUP_PRODUCTS

// A warp's results: 16 rows and all columns.
using Sums = float[16][4];
constexpr int kColumnsOfWarp = kTile, kGroupBytes = 8 * 128;
__device__ __forceinline__ int WarpRow() { return static_cast<int>(threadIdx.x / 32) * 16; }
__device__ __forceinline__ int WarpColumn() { return 0; }

template <bool kFlatA, bool kFlatB, class T>
__device__ __forceinline__ void StartProducts(uint32_t at_a, uint32_t at_b, Sums& sums) {
  using TileA = OperandTile<kFlatA>;
  using TileB = OperandTile<kFlatB>;
  OrderProductRegisters();
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    MultiplyAddWarpgroup<T, kFlatA, kFlatB>(OperandAt(TileA::Part(at_a, threadIdx.x / 128, k), TileA::kBlockBytes, kGroupBytes),
                                            OperandAt(TileB::Part(at_b, 0, k), TileB::kBlockBytes, kGroupBytes), sums);
  }
  CommitProducts();
}

#else

// A warp's results: 64 rows and 32 columns, four 16 x 32 parts one after another.
using Sums = float[16][4];
constexpr int kColumnsOfWarp = 32;
__device__ __forceinline__ int WarpRow() { return static_cast<int>(threadIdx.x / 128) * 64; }
__device__ __forceinline__ int WarpColumn() { return static_cast<int>(threadIdx.x / 32 % 4) * kColumnsOfWarp; }

template <bool kFlatA, bool kFlatB, class T>
__device__ __forceinline__ void StartProducts(uint32_t at_a, uint32_t at_b, Sums& sums) {
  using TileA = OperandTile<kFlatA>;
  using TileB = OperandTile<kFlatB>;
  const int lane = threadIdx.x % 32, part = lane / 8, line = lane % 8;  // Which 8 x 8 matrix this lane gives an address for.
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t left[4][4], right[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = WarpRow() + i * 16;
      if constexpr (kFlatA) {
        LoadMatricesTransposed(TileA::At(at_a, k + line + part / 2 * 8, row / 8 + part % 2), left[i]);
      } else {
        LoadMatrices(TileA::At(at_a, row + line + part % 2 * 8, k / 8 + part / 2), left[i]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const int column = WarpColumn() + j * 8;
      uint32_t pair[4];
      if constexpr (kFlatB) {
        LoadMatricesTransposed(TileB::At(at_b, k + line + part % 2 * 8, column / 8 + part / 2), pair);
      } else {
        LoadMatrices(TileB::At(at_b, column + line + part / 2 * 8, k / 8 + part % 2), pair);
      }
      right[j][0] = pair[0], right[j][1] = pair[1], right[j + 1][0] = pair[2], right[j + 1][1] = pair[3];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) MultiplyAdd<T>(left[i], right[j], sums[4 * i + j]);
    }
  }
}

__device__ __forceinline__ void PublishToProducts() {}
__device__ __forceinline__ void WaitForProducts() {}

#endif

// sums[i]: columns 8 (i % per row) + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8 of part i / per row, the
// warp's.
template <Product kProduct, class T>
__device__ __forceinline__ void PutSums(const Problem<T>& p, const Tile& tile, const Sums& sums) {
  constexpr bool kWeights = kProduct == Product::kWeightGradient;
  constexpr int kAcross = kColumnsOfWarp / 8;
  const int lane = threadIdx.x % 32, rows = kWeights ? p.m - tile.row : tile.end - tile.begin;
  const int first_row = WarpRow() + lane / 4, first_column = tile.column + WarpColumn() + lane % 4 * 2;
  const int64_t origin = kWeights ? tile.expert * p.stride + int64_t{tile.row} * p.n : int64_t{tile.begin} * p.n;
#pragma unroll
  for (int begin = 0; begin < 16; begin += 4) {
    // Eight loads are under way before the first store: the compiler has to think that the stores change what is loaded.
    float2 old[4][2] = {};
    const auto for_each = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + (begin + i) / kAcross * 16 + half * 8, column = first_column + (begin + i) % kAcross * 8;
          if (row < rows && column < p.n) f(i, half, origin + int64_t{row} * p.n + column);
        }
      }
    };
    if constexpr (kWeights) {
      for_each([&](int i, int half, int64_t at) { old[i][half] = *reinterpret_cast<const float2*>(p.grads + at); });
    }
    for_each([&](int i, int half, int64_t at) {
      const float first = sums[begin + i][2 * half], second = sums[begin + i][2 * half + 1];
      if constexpr (kWeights) {
        *reinterpret_cast<float2*>(p.grads + at) = {old[i][half].x + RoundTo(p.precision, first),
                                                    old[i][half].y + RoundTo(p.precision, second)};
      } else {
        StoreFloats<2>(p.c + at, {first, second});
      }
    });
  }
}

template <Product kProduct, class T> __global__ void __launch_bounds__(256, 2) TensorCoreKernel(const Problem<T> p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile = FindTile<kProduct, kTile, kTile>(p);
  if (tile.expert < 0) return;
  constexpr bool kWeights = kProduct == Product::kWeightGradient, kFlatA = kWeights, kFlatB = kProduct != Product::kForward;
  using TileA = OperandTile<kFlatA>;
  using TileB = OperandTile<kFlatB>;
  const int depth = kWeights ? tile.end - tile.begin : p.k, steps = (depth + kDepth - 1) / kDepth;
  const T* a = kWeights ? p.a + int64_t{tile.begin} * p.m + tile.row : p.a + int64_t{tile.begin} * p.k;
  const T* b = kWeights                        ? p.b + int64_t{tile.begin} * p.n + tile.column
               : kProduct == Product::kForward ? p.b + tile.expert * p.stride + int64_t{tile.column} * p.k
                                               : p.b + tile.expert * p.stride + tile.column;
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto load = [&](int step) {
    const uint32_t to = base + step % kStages * 2 * kOperandBytes;
    const int first = step * kDepth, deep = depth - first;  // Elements left along k.
    if constexpr (kFlatA) {
      TileA::Load(to, a + int64_t{first} * p.m, p.m, deep, (p.m - tile.row) / 8);
    } else {
      TileA::Load(to, a + first, p.k, tile.end - tile.begin, deep / 8);
    }
    if constexpr (kFlatB) {
      TileB::Load(to + kOperandBytes, b + int64_t{first} * p.n, p.n, deep, (p.n - tile.column) / 8);
    } else {
      TileB::Load(to + kOperandBytes, b + first, p.k, p.n - tile.column, deep / 8);
    }
  };
  const bool has_rows = static_cast<int>(threadIdx.x / 128) * 64 < (kWeights ? p.m - tile.row : tile.end - tile.begin);
  Sums sums = {};
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(step);
    CommitCopies();
  }
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kStages - 2>();
    PublishToProducts();
    __syncthreads();
    const uint32_t at_a = base + step % kStages * 2 * kOperandBytes;
    // Into the stage that all warps have left; products, where they run by themselves, go on meanwhile.
    if (has_rows) StartProducts<kFlatA, kFlatB, T>(at_a, at_a + kOperandBytes, sums);
    if (step + kStages - 1 < steps) load(step + kStages - 1);
    CommitCopies();
    WaitForProducts();
  }
  PutSums<kProduct>(p, tile, sums);
}

template <class T> bool FitsTensorCores(const Problem<T>& p, bool weights) {
  if constexpr (std::is_same_v<T, float>) return false;
  const int aligned = weights ? p.m | p.n : p.k | p.n;
  return aligned % 8 == 0 && p.stride % 8 == 0 && AreAligned16(p.a, p.b, p.c, p.grads);
}

template <Product kProduct, class T> void Launch(const Context& context, const Problem<T>& p) {
  constexpr bool kWeights = kProduct == Product::kWeightGradient;
  if (p.m == 0 || p.n == 0) return;
  const auto grid = [&](int size) {
    const int rows = kWeights ? (p.m + size - 1) / size : p.m / size + std::min(p.m, p.experts);
    return dim3((p.n + size - 1) / size, rows, kWeights ? p.experts : 1);
  };
  if constexpr (!std::is_same_v<T, float>) {
    if (FitsTensorCores(p, kWeights)) {
      static const bool allowed = [] {
        MB_CUDA(cudaFuncSetAttribute(&TensorCoreKernel<kProduct, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
        return true;
      }();
      (void)allowed;
      TensorCoreKernel<kProduct, T><<<grid(kTile), 256, kSharedBytes, StreamOf(context)>>>(p);
      return MB_CUDA_LAUNCHED();
    }
  }
  PlainKernel<kProduct, T><<<grid(kPlainTile), 256, 0, StreamOf(context)>>>(p);
  MB_CUDA_LAUNCHED();
}

void CheckRows(const Tensor& x, const Tensor& y, int64_t x_width, int64_t y_width, const Tensor& offsets, size_t experts) {
  const int64_t rows = x_width > 0 ? x.size() / x_width : 0;
  if (rows * x_width == x.size() && rows * y_width == y.size() && offsets.size() == static_cast<int64_t>(experts) + 1 &&
      rows <= INT32_MAX) {
    return;
  }
  ThrowEngineError("grouped product of {} and {} over {} offsets of {} experts", x.shape.ToString(), y.shape.ToString(),
                   offsets.size(), experts);
}

template <Product kProduct>
void MultiplyRows(const Context& context, const Tensor& x, std::span<const Tensor> weights, const Tensor& offsets,
                  const Tensor& y) {
  constexpr bool kForward = kProduct == Product::kForward;
  const int64_t stride = StrideOf(weights), out = weights[0].shape[0], in = weights[0].shape[1];
  const int64_t from = kForward ? in : out, to = kForward ? out : in;
  CheckRows(x, y, from, to, offsets, weights.size());
  if (x.dtype != weights[0].dtype || y.dtype != x.dtype)
    ThrowEngineError("grouped product of {} and {} into {}", NameOf(x.dtype), NameOf(weights[0].dtype), NameOf(y.dtype));
  WithType(x.dtype, [&]<class T>(T) {
    Launch<kProduct>(context, Problem<T>{.a = PointerOf<const T>(x),
                                         .b = PointerOf<const T>(weights[0]),
                                         .c = PointerOf<T>(y),
                                         .grads = nullptr,
                                         .stride = stride,
                                         .offsets = PointerOf<const int32_t>(offsets),
                                         .experts = static_cast<int>(weights.size()),
                                         .m = static_cast<int>(x.size() / from),
                                         .n = static_cast<int>(to),
                                         .k = static_cast<int>(from),
                                         .precision = x.dtype});
  });
}

void WeightGradientCuda(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& offsets, DType precision,
                        std::span<const Tensor> main_grads, const Tensor&) {
  const int64_t stride = StrideOf(main_grads), out = main_grads[0].shape[0], in = main_grads[0].shape[1];
  CheckRows(dy, x, out, in, offsets, main_grads.size());
  if (x.dtype != dy.dtype) ThrowEngineError("grouped product of {} and {}", NameOf(dy.dtype), NameOf(x.dtype));
  if (x.size() == 0) return;
  WithType(x.dtype, [&]<class T>(T) {
    Launch<Product::kWeightGradient>(context, Problem<T>{.a = PointerOf<const T>(dy),
                                                         .b = PointerOf<const T>(x),
                                                         .c = nullptr,
                                                         .grads = PointerOf<float>(main_grads[0]),
                                                         .stride = stride,
                                                         .offsets = PointerOf<const int32_t>(offsets),
                                                         .experts = static_cast<int>(main_grads.size()),
                                                         .m = static_cast<int>(out),
                                                         .n = static_cast<int>(in),
                                                         .k = 0,
                                                         .precision = precision});
  });
}

const bool g_registered =
    (GroupedGemm.cuda = &MultiplyRows<Product::kForward>, GroupedGemmInputGradient.cuda = &MultiplyRows<Product::kInputGradient>,
     GroupedGemmWeightGradient.cuda = &WeightGradientCuda, true);

}  // namespace
}  // namespace mbridge::cuda
