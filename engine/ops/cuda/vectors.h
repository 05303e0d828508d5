// Memory-bound kernels in one shape: a thread takes 16 bytes of columns and several rows, and issues the loads of all its rows
// before the first store.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {

template <class T> inline constexpr int kVectorSize = 16 / sizeof(T);

// kN neighbours as they lie in memory, in registers; read and written 16 bytes at a time where there are that many.
template <class T, int kN> struct Pack {
  static constexpr int kBytes = kN * static_cast<int>(sizeof(T));
  using Unit = std::conditional_t<
      kBytes % 16 == 0, uint4,
      std::conditional_t<kBytes == 8, uint2,
                         std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;
  static constexpr int kUnits = kBytes / static_cast<int>(sizeof(Unit));
  static_assert(kUnits * sizeof(Unit) == kBytes);
  Unit units[kUnits];
};

// `from` is aligned to the pack's size, at most 16 bytes.
template <int kN, class T> __device__ __forceinline__ Pack<T, kN> LoadPack(const T* from) {
  using P = Pack<T, kN>;
  P pack;
#pragma unroll
  for (int u = 0; u < P::kUnits; ++u) pack.units[u] = reinterpret_cast<const typename P::Unit*>(from)[u];
  return pack;
}
template <class T, int kN> __device__ __forceinline__ void StorePack(T* to, const Pack<T, kN>& pack) {
  using P = Pack<T, kN>;
#pragma unroll
  for (int u = 0; u < P::kUnits; ++u) reinterpret_cast<typename P::Unit*>(to)[u] = pack.units[u];
}

template <class T, int kN> __device__ __forceinline__ void Unpack(const Pack<T, kN>& pack, float (&x)[kN]) {
  if constexpr (std::is_same_v<T, uint8_t>) {  // Keep masks.
    uint8_t bytes[kN];
    memcpy(bytes, pack.units, sizeof(bytes));
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = bytes[i] != 0 ? 1.0f : 0.0f;
  } else if constexpr (std::is_same_v<T, float>) {
    memcpy(x, pack.units, sizeof(x));
  } else if constexpr (kN % 2 == 0) {
    uint32_t words[kN / 2];
    memcpy(words, pack.units, sizeof(words));
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        __half2 pair;
        memcpy(&pair, &words[i], sizeof(pair));
        const float2 wide = __half22float2(pair);
        x[2 * i] = wide.x;
        x[2 * i + 1] = wide.y;
      }
    }
  } else {
    static_assert(kN == 1);
    T value;
    memcpy(&value, pack.units, sizeof(value));
    x[0] = Widen(value);
  }
}

// The values rounded to T.
template <class T, int kN> __device__ __forceinline__ Pack<T, kN> MakePack(const float (&x)[kN]) {
  Pack<T, kN> pack;
  if constexpr (std::is_same_v<T, float>) {
    memcpy(pack.units, x, sizeof(x));
  } else if constexpr (kN % 2 == 0) {
    uint32_t words[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
      }
    }
    memcpy(pack.units, words, sizeof(words));
  } else {
    static_assert(kN == 1);
    const T value = Narrow<T>(x[0]);
    memcpy(pack.units, &value, sizeof(value));
  }
  return pack;
}

template <int kN, class T> __device__ __forceinline__ void LoadFloats(const T* from, float (&x)[kN]) {
  Unpack(LoadPack<kN>(from), x);
}
template <int kN, class T> __device__ __forceinline__ void StoreFloats(T* to, const float (&x)[kN]) {
  StorePack(to, MakePack<T, kN>(x));
}

// 1 / (1 + exp(-x)): to the last bits of F32, or with an error of about 1e-6, far below the rounding of a 16-bit T.
template <class T> __device__ __forceinline__ float Sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>) return 1.0f / (1.0f + expf(-x));
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

inline bool IsAligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }
// Null pointers count as aligned.
template <class... Pointers> bool AreAligned16(Pointers... pointers) { return (IsAligned(pointers, 16) && ...); }

inline int64_t LastDimension(const Tensor& x) { return x.shape[x.shape.rank() - 1]; }

inline void CheckStorage(const Tensor& x, DType precision) {
  if (x.dtype != precision) ThrowEngineError("CUDA operator on {} values rounded to {}", NameOf(x.dtype), NameOf(precision));
}

// function(T, P): T the type of the storage, which is F32 or that of the precision, P the precision. Throws for another storage.
template <class Function> void WithStorage(DType storage, DType precision, const Function& function) {
  if (storage != precision && storage != DType::kF32) {
    ThrowEngineError("CUDA operator on {} values rounded to {}", NameOf(storage), NameOf(precision));
  }
  WithType(storage, [&]<class T>(T) {
    WithType(precision, [&]<class P>(P) {
      if constexpr (std::is_same_v<T, float> || std::is_same_v<T, P>) function(T{}, P{});
    });
  });
}

// Typed pointer of a tensor with a device type; null for an empty one.
template <class T> T* PointerOf(const Tensor& x) { return static_cast<T*>(x.data); }

// Body:  Columns: Columns(column) -> what all rows share;  Row: Load(row, column);  Finish(columns, row's data, row, column).
// `column` is the first of Body::kN neighbours. Finish of one row may overwrite only what Load read for that row and column.
template <int kRows, class Body>
__global__ void __launch_bounds__(256) RowsKernel(const Body body, int64_t rows, int64_t vectors, unsigned tiles) {
  const int64_t vector = int64_t{blockIdx.x % tiles} * blockDim.x + threadIdx.x;
  if (vector >= vectors) return;
  const int64_t column = vector * Body::kN;
  const int64_t first = int64_t{blockIdx.x / tiles} * kRows * blockDim.y + threadIdx.y;
  const auto columns = body.Columns(column);
  typename Body::Row loaded[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = first + k * blockDim.y;
    if (row < rows) loaded[k] = body.Load(row, column);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = first + k * blockDim.y;
    if (row < rows) body.Finish(columns, loaded[k], row, column);
  }
}

// How the threads of RowsKernel lie over rows of `width` columns, `per_thread` neighbours and `rows_each` rows to each.
struct RowsLaunch {
  RowsLaunch(int64_t rows, int64_t width, int per_thread, int rows_each) : vectors(width / per_thread) {
    const int64_t across = (vectors + 255) / 256;
    const int64_t threads = ((vectors + across - 1) / across + 31) / 32 * 32;
    const int64_t block_rows = 256 / threads;
    const int64_t chunks = (rows + rows_each * block_rows - 1) / (rows_each * block_rows);
    if (across * chunks > INT32_MAX) ThrowEngineError("an operator over {} rows of {} columns is too large", rows, width);
    tiles = static_cast<unsigned>(across);
    blocks = static_cast<unsigned>(across * chunks);
    block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(block_rows));
  }
  int64_t vectors;
  unsigned tiles, blocks;
  dim3 block;
};

// Runs a body over rows of `width` columns, a multiple of Body::kN.
template <int kRows, class Body> void LaunchRows(const Context& context, const Body& body, int64_t rows, int64_t width) {
  if (rows == 0 || width == 0) return;
  const RowsLaunch launch(rows, width, Body::kN, kRows);
  RowsKernel<kRows><<<launch.blocks, launch.block, 0, StreamOf(context)>>>(body, rows, launch.vectors, launch.tiles);
  MB_CUDA_LAUNCHED();
}

// Runs over `count` elements without rows. make(std::integral_constant<int, kN>, offset, width) gives the body for elements from
// `offset` on, in rows of `width`.
template <int kRows, int kN, class Make> void LaunchFlat(const Context& context, int64_t count, bool aligned, Make&& make) {
  const int64_t row = 256 * kN, rows = aligned ? count / row : 0, done = rows * row;
  if (rows > 0) LaunchRows<kRows>(context, make(std::integral_constant<int, kN>(), int64_t{0}, row), rows, row);
  const int64_t left = count - done, left_rows = left / 256;
  const std::integral_constant<int, 1> one;
  if (left_rows > 0) LaunchRows<kRows>(context, make(one, done, int64_t{256}), left_rows, 256);
  const int64_t tail = left % 256;
  if (tail > 0) LaunchRows<1>(context, make(one, done + left_rows * 256, tail), 1, tail);
}

}  // namespace mbridge::cuda
