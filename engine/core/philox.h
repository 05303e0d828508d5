// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a counter-based generator, and the batch
// kernel behind dropout masks. How PyTorch lays its draws out on a CUDA device is in torch_random.h.
#pragma once

#include <array>
#include <cstdint>

namespace mbridge {

using PhiloxWords = std::array<uint32_t, 4>;

// One block: ten rounds over a 128-bit counter with a 64-bit key.
PhiloxWords Philox4x32(const PhiloxWords& counter, uint64_t key);

// cuRAND's addressing: the block of subsequence `subsequence` at position `offset` (a multiple of 4), seeded with `seed`.
inline PhiloxWords PhiloxAt(uint64_t seed, uint64_t subsequence, uint64_t offset) {
  const uint64_t block = offset / 4;
  return Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(subsequence),
                     static_cast<uint32_t>(subsequence >> 32)},
                    seed);
}

// Comparisons of eight consecutive blocks, vectorised with AVX2 where it is there.
//
// Subsequences first .. first + 7 at 64-bit block number `block`: byte i of out[lane] is 1 if word i of that lane's block is
// below `limit`, else 0. `limit` of 2^32 keeps every word.
void PhiloxBelowBySubsequence(uint64_t seed, uint64_t block, uint32_t first, uint64_t limit, uint32_t out[8]);

// Counters (first + lane, 0, 0, 0): out[lane] is 1 if the first word x, read as int32 and folded (x < 0: -x - 1), is at least
// `limit`, else 0.
void PhiloxFoldedAtLeastByCounter(uint64_t key, uint32_t first, uint32_t limit, uint8_t out[8]);

}  // namespace mbridge
