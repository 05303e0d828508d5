#include "engine/core/philox.h"

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mbridge {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier2 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr int kRounds = 10;

#if defined(__AVX2__)

struct Product {
  __m256i low, high;
};

inline Product Multiply(__m256i a, __m256i multiplier) {
  const __m256i even = _mm256_mul_epu32(a, multiplier);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), multiplier);
  return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA), _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA)};
}

// Eight blocks at once; c[i] holds word i of every lane.
inline void Rounds(__m256i c[4], uint64_t key) {
  const __m256i multiplier0 = _mm256_set1_epi32(static_cast<int>(kMultiplier0));
  const __m256i multiplier2 = _mm256_set1_epi32(static_cast<int>(kMultiplier2));
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const Product p0 = Multiply(c[0], multiplier0), p2 = Multiply(c[2], multiplier2);
    c[0] = _mm256_xor_si256(_mm256_xor_si256(p2.high, c[1]), _mm256_set1_epi32(static_cast<int>(key0)));
    c[1] = p2.low;
    c[2] = _mm256_xor_si256(_mm256_xor_si256(p0.high, c[3]), _mm256_set1_epi32(static_cast<int>(key1)));
    c[3] = p0.low;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// first, first + 1, ... first + 7.
inline __m256i Lanes(uint32_t first) {
  return _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#endif

}  // namespace

PhiloxWords Philox4x32(const PhiloxWords& counter, uint64_t key) {
  PhiloxWords c = counter;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{kMultiplier0} * c[0], p2 = uint64_t{kMultiplier2} * c[2];
    c = {static_cast<uint32_t>(p2 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(p2), static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1,
         static_cast<uint32_t>(p0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

void PhiloxBelowBySubsequence(uint64_t seed, uint64_t block, uint32_t first, uint64_t limit, uint32_t out[8]) {
#if defined(__AVX2__)
  if (limit >= 1 && limit <= 0xFFFFFFFFu) {
    __m256i c[4] = {_mm256_set1_epi32(static_cast<int>(block)), _mm256_set1_epi32(static_cast<int>(block >> 32)), Lanes(first),
                    _mm256_setzero_si256()};
    Rounds(c, seed);
    const __m256i last = _mm256_set1_epi32(static_cast<int>(limit - 1));
    __m256i packed = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      // x < limit as min(x, limit - 1) == x.
      const __m256i below = _mm256_cmpeq_epi32(_mm256_min_epu32(c[i], last), c[i]);
      packed = _mm256_or_si256(packed, _mm256_and_si256(below, _mm256_set1_epi32(1 << (8 * i))));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), packed);
    return;
  }
#endif
  for (uint32_t lane = 0; lane < 8; ++lane) {
    const PhiloxWords words = PhiloxAt(seed, first + lane, block * 4);
    out[lane] = 0;
    for (int i = 0; i < 4; ++i) out[lane] |= static_cast<uint32_t>(words[i] < limit) << (8 * i);
  }
}

void PhiloxFoldedAtLeastByCounter(uint64_t key, uint32_t first, uint32_t limit, uint8_t out[8]) {
#if defined(__AVX2__)
  const __m256i zero = _mm256_setzero_si256();
  __m256i c[4] = {Lanes(first), zero, zero, zero};
  Rounds(c, key);
  const __m256i folded = _mm256_xor_si256(c[0], _mm256_srai_epi32(c[0], 31));
  const __m256i enough = _mm256_cmpeq_epi32(_mm256_max_epu32(folded, _mm256_set1_epi32(static_cast<int>(limit))), folded);
  const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(enough));
  // Spreads eight bits over eight bytes.
  const uint64_t bytes = ((static_cast<uint64_t>(bits) * 0x8040201008040201ull) & 0x8080808080808080ull) >> 7;
  const uint64_t ordered = __builtin_bswap64(bytes);
  std::memcpy(out, &ordered, 8);
#else
  for (uint32_t lane = 0; lane < 8; ++lane) {
    const int32_t x = static_cast<int32_t>(Philox4x32({first + lane, 0, 0, 0}, key)[0]);
    out[lane] = static_cast<uint32_t>(x < 0 ? -x - 1 : x) >= limit;
  }
#endif
}

}  // namespace mbridge
