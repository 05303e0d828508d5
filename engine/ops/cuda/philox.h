// Philox4x32-10 on the device; engine/core/philox.h is its twin on the host.
#pragma once

#include <cstdint>

namespace mbridge::cuda {

__device__ __forceinline__ uint4 Philox4x32(uint4 counter, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.x, b = uint64_t{0xCD9E8D57u} * counter.z;
    counter = make_uint4(static_cast<uint32_t>(b >> 32) ^ counter.y ^ k0, static_cast<uint32_t>(b),
                         static_cast<uint32_t>(a >> 32) ^ counter.w ^ k1, static_cast<uint32_t>(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// Block number `block` (offset / 4) of a subsequence, as cuRAND counts.
__device__ __forceinline__ uint4 PhiloxBlock(uint64_t seed, uint64_t subsequence, uint64_t block) {
  return Philox4x32(make_uint4(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                               static_cast<uint32_t>(subsequence), static_cast<uint32_t>(subsequence >> 32)),
                    seed);
}

}  // namespace mbridge::cuda
