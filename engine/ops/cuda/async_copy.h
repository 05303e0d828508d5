// Copies from global to shared memory that go on while the thread works.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace mbridge::cuda {

// 16 aligned bytes. The thread sees what it copied itself once it has waited; others need a barrier after that.
__device__ __forceinline__ void CopyAsync16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
// The same, or zeros; `to` is an address of shared memory, `from` a valid address either way.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
// Ends a group: the thread's copies since the last one, perhaps none.
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of the thread's groups but the last kPending are there.
template <int kPending> __device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// f(std::integral_constant<int, k>()) for k from 0 on: a loop whose counter is a constant.
template <int kCount, class F> __device__ __forceinline__ void ForEachIndex(F&& f) {
  [&]<int... k>(std::integer_sequence<int, k...>) { (f(std::integral_constant<int, k>()), ...); }
  (std::make_integer_sequence<int, kCount>());
}

}  // namespace mbridge::cuda
