#include "engine/core/numpy_random.h"

#include <bit>

namespace mbridge {
namespace {

constexpr uint32_t kInitA = 0x43b0d7e5u, kMultA = 0x931e8875u;
constexpr uint32_t kInitB = 0x8b51f9ddu, kMultB = 0x58f38dedu;
constexpr uint32_t kMixL = 0xca01f9ddu, kMixR = 0x4973f715u;

uint32_t HashMix(uint32_t value, uint32_t& hash_constant, uint32_t multiplier) {
  value ^= hash_constant;
  hash_constant *= multiplier;
  value *= hash_constant;
  return value ^ (value >> 16);
}

uint32_t Mix(uint32_t x, uint32_t y) {
  const uint32_t result = kMixL * x - kMixR * y;
  return result ^ (result >> 16);
}

unsigned __int128 Join(uint64_t high, uint64_t low) { return static_cast<unsigned __int128>(high) << 64 | low; }

}  // namespace

std::array<uint64_t, 4> NumpySeedSequence(uint64_t seed) {
  const std::array<uint32_t, 4> entropy = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0};
  std::array<uint32_t, 4> pool;
  uint32_t hash_constant = kInitA;
  for (int i = 0; i < 4; ++i) pool[i] = HashMix(entropy[i], hash_constant, kMultA);
  for (int source = 0; source < 4; ++source) {
    for (int target = 0; target < 4; ++target) {
      if (source != target) pool[target] = Mix(pool[target], HashMix(pool[source], hash_constant, kMultA));
    }
  }
  std::array<uint64_t, 4> state;
  hash_constant = kInitB;
  for (int word = 0; word < 4; ++word) {
    const uint64_t low = HashMix(pool[(2 * word) % 4], hash_constant, kMultB);
    const uint64_t high = HashMix(pool[(2 * word + 1) % 4], hash_constant, kMultB);
    state[word] = high << 32 | low;
  }
  return state;
}

constexpr uint64_t kPcgMultiplierHigh = 2549297995355413924ull, kPcgMultiplierLow = 4865540595714422341ull;

NumpyGenerator::NumpyGenerator(uint64_t seed) {
  const auto words = NumpySeedSequence(seed);
  increment_ = (Join(words[2], words[3]) << 1) | 1;
  const uint128 multiplier = Join(kPcgMultiplierHigh, kPcgMultiplierLow);
  state_ = increment_;  // One step from zero.
  state_ += Join(words[0], words[1]);
  state_ = state_ * multiplier + increment_;
}

uint64_t NumpyGenerator::Next64() {
  state_ = state_ * Join(kPcgMultiplierHigh, kPcgMultiplierLow) + increment_;
  const uint64_t folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
  return std::rotr(folded, static_cast<int>(state_ >> 122));
}

uint32_t NumpyGenerator::Next32() {
  if (has_buffered_) {
    has_buffered_ = false;
    return buffered_;
  }
  const uint64_t value = Next64();
  buffered_ = static_cast<uint32_t>(value >> 32);
  has_buffered_ = true;
  return static_cast<uint32_t>(value);
}

int32_t NumpyGenerator::Integer(int64_t low, int64_t high) {
  const uint32_t range = static_cast<uint32_t>(high - 1 - low);
  if (range == 0) return static_cast<int32_t>(low);
  if (range == 0xffffffffu) return static_cast<int32_t>(low + Next32());
  const uint32_t count = range + 1;  // Lemire's multiply-and-reject on 32 bits.
  uint64_t product = static_cast<uint64_t>(Next32()) * count;
  if (static_cast<uint32_t>(product) < count) {
    const uint32_t threshold = (0xffffffffu - range) % count;
    while (static_cast<uint32_t>(product) < threshold) product = static_cast<uint64_t>(Next32()) * count;
  }
  return static_cast<int32_t>(low + static_cast<int64_t>(product >> 32));
}

uint32_t NumpyRandomState::Interval(uint32_t max) {
  if (max == 0) return 0;
  const uint32_t mask = 0xffffffffu >> std::countl_zero(max);
  uint32_t value;
  do value = Next32() & mask;
  while (value > max);
  return value;
}

}  // namespace mbridge
