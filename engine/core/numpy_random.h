// NumPy's random streams, draw for draw: default_rng (SeedSequence + PCG64) and the legacy RandomState (MT19937).
//
// They decide the lengths of Megatron-LM's mock documents and every data shuffle (numpy/random: bit_generator.pyx,
// pcg64.c, distributions.c, mt19937.c). Not thread-safe: one generator per user.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <utility>

namespace mbridge {

// SeedSequence(seed).generate_state(4, uint64) for a non-negative integer seed.
std::array<uint64_t, 4> NumpySeedSequence(uint64_t seed);

// numpy.random.default_rng(seed): PCG64 (XSL-RR 128/64).
class NumpyGenerator {
 public:
  explicit NumpyGenerator(uint64_t seed);

  uint64_t Next64();
  // Low half of a 64-bit draw, then its high half on the following call.
  uint32_t Next32();
  // integers(low, high, dtype=int32), one element; low < high, high - low < 2^32.
  int32_t Integer(int64_t low, int64_t high);

 private:
  using uint128 = unsigned __int128;
  uint128 state_;
  uint128 increment_;
  uint32_t buffered_ = 0;
  bool has_buffered_ = false;
};

// numpy.random.RandomState(seed) with a seed in [0, 2^32).
class NumpyRandomState {
 public:
  explicit NumpyRandomState(uint32_t seed) : engine_(seed) {}

  uint32_t Next32() { return static_cast<uint32_t>(engine_()); }
  // Uniform in [0, max] by masked rejection (legacy random_interval).
  uint32_t Interval(uint32_t max);
  // shuffle() of a one-dimensional array in place, fewer than 2^32 elements.
  template <class T> void Shuffle(std::span<T> values) {
    for (size_t i = values.size(); i-- > 1;) std::swap(values[i], values[Interval(static_cast<uint32_t>(i))]);
  }

 private:
  std::mt19937 engine_;  // Same initialisation and tempering as NumPy's init_genrand.
};

}  // namespace mbridge
