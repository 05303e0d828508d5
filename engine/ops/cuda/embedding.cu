#include "engine/ops/embedding.h"

#include <cub/device/device_radix_sort.cuh>

#include "engine/ops/cuda/vectors.h"
#include "engine/ops/dropout.h"

namespace mbridge::cuda {
namespace {

template <class T, int kWidth> struct ForwardBody {
  static constexpr int kN = kWidth;
  struct Row {
    Pack<T, kN> word, place;
    Pack<uint8_t, kN> keep;
  };
  struct Nothing {};
  const int32_t *tokens, *position_ids;
  const T *words, *positions;
  const uint8_t* keep;
  T* y;
  float scale;
  int64_t n;
  uint32_t batch, sequence;

  __device__ Nothing Columns(int64_t) const { return {}; }
  __device__ Row Load(int64_t row, int64_t column) const {
    const auto r = static_cast<uint32_t>(row);
    const uint32_t at = r % batch * sequence + r / batch;
    Row loaded;
    const int32_t id = tokens[at];
    loaded.word = {};
    if (id >= 0) loaded.word = LoadPack<kN>(words + id * n + column);
    if (positions != nullptr) loaded.place = LoadPack<kN>(positions + position_ids[at] * n + column);
    if (keep != nullptr) loaded.keep = LoadPack<kN>(keep + row * n + column);
    return loaded;
  }
  __device__ void Finish(const Nothing&, const Row& loaded, int64_t row, int64_t column) const {
    float values[kN], other[kN];
    Unpack(loaded.word, values);
    if (positions != nullptr) {
      Unpack(loaded.place, other);
#pragma unroll
      for (int i = 0; i < kN; ++i) values[i] = Round<T>(__fadd_rn(values[i], other[i]));
    }
    if (keep != nullptr) {
      Unpack(loaded.keep, other);
#pragma unroll
      for (int i = 0; i < kN; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], other[i]), scale);
    }
    StoreFloats<kN>(y + row * n + column, values);
  }
};

void ForwardCuda(const Context& context, const Tensor& tokens, const Tensor& position_ids, const Tensor& words,
                 const Tensor& positions, const Tensor& keep, double p, DType precision, const Tensor& y) {
  CheckStorage(words, precision);
  const int64_t b = tokens.shape[0], s = tokens.shape[1], h = words.shape[1];
  if (b * s > INT32_MAX) ThrowEngineError("embedding of {} tokens", b * s);
  const float scale = DropoutScale(DropoutKind::kEager, p);
  WithType(words.dtype, [&]<class T>(T) {
    const T *table = PointerOf<T>(words), *places = PointerOf<T>(positions);
    const uint8_t* kept = PointerOf<uint8_t>(keep);
    T* out = PointerOf<T>(y);
    const auto run = [&]<int kN>(std::integral_constant<int, kN>) {
      const ForwardBody<T, kN> body{
          PointerOf<int32_t>(tokens), PointerOf<int32_t>(position_ids), table, places, kept, out, scale, h,
          static_cast<uint32_t>(b),   static_cast<uint32_t>(s)};
      LaunchRows<4>(context, body, b * s, h);
    };
    if (h % kVectorSize<T> == 0 && AreAligned16(table, places, out) && IsAligned(kept, kVectorSize<T>)) {
      run(std::integral_constant<int, kVectorSize<T>>());
    } else {
      run(std::integral_constant<int, 1>());
    }
  });
}

// Backward: ids are sorted, keeping the order of equal ones, so that the gradients of an id are neighbours and are summed in
// order by one thread per column.
struct Sorted {
  const int32_t *ids, *places;  // Ascending ids, and where each stands in [b, s].
  int count, batch, sequence;
  int outside;  // What stands for ids below 0, after all others.
  __device__ int64_t GradientRow(int place) const { return int64_t{place % sequence} * batch + place / sequence; }
};

// The table's rows: sum is rounded and joins `row`, which was read from `grad`.
template <class T, bool kTied, int kN>
__device__ __forceinline__ void AddToTable(float* grad, const Pack<float, kN>& loaded, const float (&sum)[kN]) {
  float row[kN];
  Unpack(loaded, row);
#pragma unroll
  for (int i = 0; i < kN; ++i) row[i] = kTied ? Round<T>(Round<T>(row[i]) + Round<T>(sum[i])) : row[i] + Round<T>(sum[i]);
  StoreFloats<kN>(grad, row);
}
template <class T, bool kTied, int kN> __device__ __forceinline__ void AddToTable(float* grad, const float (&sum)[kN]) {
  AddToTable<T, kTied, kN>(grad, LoadPack<kN>(grad), sum);
}

// PyTorch's kernel for few ids: chunks of 32 ids in their original order, one rounding a chunk. A block for each sorted position
// that begins an id.
constexpr int kChunk = 32, kMaxChunked = 3072;

template <class T, bool kTied, int kN>
__global__ void __launch_bounds__(256) ChunksKernel(const Sorted sorted, const T* dy, int64_t h, float* grad, unsigned tiles) {
  constexpr int kUnroll = 4;
  const int first = static_cast<int>(blockIdx.x / tiles);
  const int id = sorted.ids[first];
  if (id == sorted.outside || (first > 0 && sorted.ids[first - 1] == id)) return;
  const int64_t column = (int64_t{blockIdx.x % tiles} * blockDim.x + threadIdx.x) * kN;
  if (column >= h) return;
  float total[kN] = {}, sum[kN] = {};
  int chunk = sorted.places[first] / kChunk;
  for (int base = first; base < sorted.count && sorted.ids[base] == id; base += kUnroll) {
    Pack<T, kN> loaded[kUnroll];
    int chunks[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      chunks[k] = -1;
      if (base + k >= sorted.count || sorted.ids[base + k] != id) continue;
      const int place = sorted.places[base + k];
      chunks[k] = place / kChunk;
      loaded[k] = LoadPack<kN>(dy + sorted.GradientRow(place) * h + column);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (chunks[k] < 0) continue;
      if (chunks[k] != chunk) {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          total[i] = Round<T>(total[i] + sum[i]);
          sum[i] = 0.0f;
        }
        chunk = chunks[k];
      }
      float values[kN];
      Unpack(loaded[k], values);
#pragma unroll
      for (int i = 0; i < kN; ++i) sum[i] += values[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) total[i] += sum[i];
  AddToTable<T, kTied>(grad + id * h + column, total);
}

// Many ids: pieces of 32 sorted positions. What an id has in one piece joins the table at once if the piece holds all of it, else
// it is left in `gathered`, in the row of its first position in the piece.
constexpr int kPiece = 32;

template <class T, bool kTied, int kN>
__global__ void __launch_bounds__(256)
    PiecesKernel(const Sorted sorted, const T* dy, int64_t h, float* grad, float* gathered, unsigned tiles) {
  constexpr int kUnroll = 4;
  __shared__ int32_t ids[kPiece + 2];  // With both neighbours of the piece, -1 where there is none.
  __shared__ int64_t rows[kPiece];
  const int first = static_cast<int>(blockIdx.x / tiles) * kPiece;
  const int count = min(kPiece, sorted.count - first);
  for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
    const int at = first + i - 1;
    ids[i] = at >= 0 && at < sorted.count ? sorted.ids[at] : -1;
    if (i < count) rows[i] = sorted.GradientRow(sorted.places[first + i]);
  }
  __syncthreads();
  const int64_t column = (int64_t{blockIdx.x % tiles} * blockDim.x + threadIdx.x) * kN;
  if (column >= h) return;
  // Whether position i is the last of an id that the piece holds all of.
  const auto completes = [&](int i) { return ids[i + 2] != ids[i + 1] && ids[0] != ids[i + 1]; };
  float sum[kN] = {};
  int start = 0;
  for (int base = 0; base < count; base += kUnroll) {
    Pack<T, kN> loaded[kUnroll];
    Pack<float, kN> table[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = base + k;
      if (i >= count || ids[i + 1] == sorted.outside) continue;
      loaded[k] = LoadPack<kN>(dy + rows[i] * h + column);
      if (completes(i)) table[k] = LoadPack<kN>(grad + ids[i + 1] * h + column);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = base + k;
      if (i >= count || ids[i + 1] == sorted.outside) continue;
      float values[kN];
      Unpack(loaded[k], values);
#pragma unroll
      for (int j = 0; j < kN; ++j) sum[j] += values[j];
      const int id = ids[i + 1];
      if (i + 1 < count && ids[i + 2] == id) continue;
      if (completes(i)) {
        AddToTable<T, kTied>(grad + id * h + column, table[k], sum);
      } else {
        StoreFloats<kN>(gathered + int64_t{first + start} * h + column, sum);
      }
      start = i + 1;
#pragma unroll
      for (int j = 0; j < kN; ++j) sum[j] = 0.0f;
    }
  }
}

// Joins what ids that reach over a piece's end left in `gathered`; the piece where the id begins does it.
template <class T, bool kTied, int kN>
__global__ void __launch_bounds__(256)
    JoinKernel(const Sorted sorted, int64_t h, float* grad, const float* gathered, unsigned tiles) {
  constexpr int kUnroll = 4;
  const int first = static_cast<int>(blockIdx.x / tiles) * kPiece, next = first + kPiece;
  if (next >= sorted.count) return;
  const int id = sorted.ids[next - 1];
  if (id == sorted.outside || sorted.ids[next] != id) return;
  int start = next - 1;
  while (start > first && sorted.ids[start - 1] == id) --start;
  if (start == first && first > 0 && sorted.ids[first - 1] == id) return;
  const int64_t column = (int64_t{blockIdx.x % tiles} * blockDim.x + threadIdx.x) * kN;
  if (column >= h) return;
  float sum[kN];
  LoadFloats<kN>(gathered + start * h + column, sum);
  for (int64_t base = next; base < sorted.count && sorted.ids[base] == id; base += kUnroll * kPiece) {
    Pack<float, kN> loaded[kUnroll];
    bool valid[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t at = base + k * kPiece;
      valid[k] = at < sorted.count && sorted.ids[at] == id;
      if (valid[k]) loaded[k] = LoadPack<kN>(gathered + at * h + column);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (!valid[k]) continue;
      float values[kN];
      Unpack(loaded[k], values);
#pragma unroll
      for (int i = 0; i < kN; ++i) sum[i] += values[i];
    }
  }
  AddToTable<T, kTied>(grad + id * h + column, sum);
}

__global__ void MakeKeysKernel(const int32_t* ids, int count, uint32_t outside, uint32_t* keys, int32_t* places) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  keys[i] = ids[i] < 0 ? outside : static_cast<uint32_t>(ids[i]);
  places[i] = i;
}

// Sorts into the workspace.
Sorted SortIds(const Context& context, const Tensor& ids, int64_t vocabulary) {
  const auto count = static_cast<int>(ids.size());
  const int64_t padded = (ids.size() + 63) / 64 * 64;
  int bits = 1;
  while ((int64_t{1} << bits) < vocabulary) ++bits;
  if (bits > 30) ThrowEngineError("embedding table of {} rows", vocabulary);
  const cudaStream_t stream = StreamOf(context);
  const auto sort = [&](void* memory, size_t* bytes, const uint32_t* keys, uint32_t* sorted_keys, const int32_t* places,
                        int32_t* sorted_places) {
    MB_CUDA(
        cub::DeviceRadixSort::SortPairs(memory, *bytes, keys, sorted_keys, places, sorted_places, count, 0, bits + 1, stream));
  };
  size_t sort_bytes = 0;
  sort(nullptr, &sort_bytes, nullptr, nullptr, nullptr, nullptr);
  auto* const keys = reinterpret_cast<uint32_t*>(WorkspaceOf<char>(context, 4 * padded * 4 + static_cast<int64_t>(sort_bytes)));
  uint32_t* const sorted_keys = keys + padded;
  auto* const places = reinterpret_cast<int32_t*>(keys + 2 * padded);
  int32_t* const sorted_places = places + padded;
  const uint32_t outside = 1u << bits;
  MakeKeysKernel<<<(count + 255) / 256, 256, 0, stream>>>(PointerOf<int32_t>(ids), count, outside, keys, places);
  MB_CUDA_LAUNCHED();
  sort(sorted_places + padded, &sort_bytes, keys, sorted_keys, places, sorted_places);
  return {.ids = reinterpret_cast<int32_t*>(sorted_keys),
          .places = sorted_places,
          .count = count,
          .batch = static_cast<int>(ids.shape[0]),
          .sequence = static_cast<int>(ids.shape[1]),
          .outside = static_cast<int>(outside)};
}

template <class T, bool kTied, int kN>
void LaunchBackward(const Context& context, const Sorted& sorted, const T* dy, int64_t h, float* grad, float* gathered) {
  const int64_t vectors = h / kN, tiles = (vectors + 255) / 256;
  const auto threads = static_cast<unsigned>(((vectors + tiles - 1) / tiles + 31) / 32 * 32);
  const int64_t blocks = sorted.count <= kMaxChunked ? sorted.count : (sorted.count + kPiece - 1) / kPiece;
  if (blocks * tiles > INT32_MAX) ThrowEngineError("embedding gradient of {} tokens of {} is too large", sorted.count, h);
  const auto grid = static_cast<unsigned>(blocks * tiles), t = static_cast<unsigned>(tiles);
  const cudaStream_t stream = StreamOf(context);
  if (sorted.count <= kMaxChunked) {
    ChunksKernel<T, kTied, kN><<<grid, threads, 0, stream>>>(sorted, dy, h, grad, t);
  } else {
    PiecesKernel<T, kTied, kN><<<grid, threads, 0, stream>>>(sorted, dy, h, grad, gathered, t);
    MB_CUDA_LAUNCHED();
    JoinKernel<T, kTied, kN><<<grid, threads, 0, stream>>>(sorted, h, grad, gathered, t);
  }
  MB_CUDA_LAUNCHED();
}

void BackwardCuda(const Context& context, const Tensor& ids, const Tensor& dy, DType precision, EmbeddingSum sum,
                  const Tensor& grad, const Tensor& touched, const Tensor& gathered) {
  CheckStorage(dy, precision);
  const int64_t h = grad.shape[1];
  if (ids.size() == 0) return;
  if (ids.size() > INT32_MAX / 2) ThrowEngineError("embedding gradient of {} tokens", ids.size());
  const Sorted sorted = SortIds(context, ids, grad.shape[0]);
  WithType(dy.dtype, [&]<class T>(T) {
    const T* g = PointerOf<T>(dy);
    float *table = PointerOf<float>(grad), *sums = PointerOf<float>(gathered);
    const auto run = [&]<bool kTied>(std::bool_constant<kTied>) {
      if (h % kVectorSize<T> == 0 && AreAligned16(g, table, sums)) {
        LaunchBackward<T, kTied, kVectorSize<T>>(context, sorted, g, h, table, sums);
      } else {
        LaunchBackward<T, kTied, 1>(context, sorted, g, h, table, sums);
      }
    };
    sum == EmbeddingSum::kTiedGradient ? run(std::true_type()) : run(std::false_type());
  });
}

const bool g_registered = (EmbeddingForward.cuda = &ForwardCuda, EmbeddingBackward.cuda = &BackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
