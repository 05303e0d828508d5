// Products of a warpgroup, four warps from a multiple of four on: sm_90a only (MB_WARPGROUP_PRODUCTS is defined where code for it
// is generated). Operands lie in shared memory in the 128-byte swizzle: lines of 128 bytes, 16-byte chunk c of line l at place c
// ^ (l % 8), from an address that is a multiple of 1024 on.
#pragma once

#include "engine/ops/cuda/launch.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MB_WARPGROUP_PRODUCTS

namespace mbridge::cuda {

// What this thread wrote to shared memory, asynchronous copies that have ended included, becomes visible to products after the
// next barrier.
__device__ __forceinline__ void PublishToProducts() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product that uses registers which other instructions wrote.
__device__ __forceinline__ void OrderProductRegisters() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all products of this warpgroup have ended.
__device__ __forceinline__ void WaitForProducts() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Where an operand lies. With k along the lines (64 values each): eight lines are `group` bytes from the next eight. With k
// across them (a line is 64 rows or columns at one k): eight lines are `group` bytes from the next eight, and 64 rows or columns
// `block` bytes from the next 64.
__device__ __forceinline__ uint64_t OperandAt(uint32_t address, uint32_t block, uint32_t group) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{group >> 4} << 32 | uint64_t{block >> 4} << 16 | ((address & 0x3ffff) >> 4);
}

// c += a b, a 64 x 16, b 16 x 128. kAcross: k runs across the lines. Warp w of the four has rows 16 w and on; of its 16 x 128
// results lane l has, in c[j], columns 8 j + 2 (l % 4) and the next of row l / 4, then of row l / 4 + 8.
template <class T, bool kAcrossA, bool kAcrossB>
__device__ __forceinline__ void MultiplyAddWarpgroup(uint64_t a, uint64_t b, float (&c)[16][4]) {
#define MB_C(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define MB_PRODUCT(type)                                                                                                        \
  asm volatile(                                                                                                                 \
      "{ .reg .pred all; setp.ne.b32 all, %68, 0;"                                                                              \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                              \
      " {"                                                                                                                      \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                  \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                        \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                        \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                                          \
      "}, %64, %65, all, 1, 1, %66, %67; }"                                                                                     \
      : MB_C(0), MB_C(1), MB_C(2), MB_C(3), MB_C(4), MB_C(5), MB_C(6), MB_C(7), MB_C(8), MB_C(9), MB_C(10), MB_C(11), MB_C(12), \
        MB_C(13), MB_C(14), MB_C(15)                                                                                            \
      : "l"(a), "l"(b), "n"(kAcrossA ? 1 : 0), "n"(kAcrossB ? 1 : 0), "r"(1))
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MB_PRODUCT("bf16");
  } else {
    MB_PRODUCT("f16");
  }
#undef MB_PRODUCT
#undef MB_C
}

}  // namespace mbridge::cuda

#endif
