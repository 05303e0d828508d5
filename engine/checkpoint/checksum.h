// XXH3-64 of bytes that come piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>

#define XXH_STATIC_LINKING_ONLY  // Makes the state's size known.
#include <xxhash.h>

namespace mbridge {

class Checksum {
 public:
  Checksum() { XXH3_64bits_reset(&state_); }
  void Update(const void* data, size_t bytes) { XXH3_64bits_update(&state_, data, bytes); }
  uint64_t Value() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

}  // namespace mbridge
