// Instructions of sm_80 and later that C++ has no words for: loads of 8 x 8 matrices from shared memory, which is addressed by
// its 32-bit window, and 16 x 8 x 16 products.
#pragma once

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {

// Four matrices of 16-bit values; lane l gives the address of line l % 8 of matrix l / 8. Lane l gets elements 2 (l % 4) and the
// next of line l / 4 of each; transposed: element l / 4 of lines 2 (l % 4) and the next.
__device__ __forceinline__ void LoadMatrices(uint32_t at, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t at, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// c += a b for a warp: a 16 x 16 in four matrices (upper left, lower left, upper right, lower right), b 16 x 8 in two (k 0 .. 7,
// then 8 .. 15), c 16 x 8: lane l has elements 2 (l % 4) and the next of rows l / 4 and l / 4 + 8.
template <class T> __device__ __forceinline__ void MultiplyAdd(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace mbridge::cuda
