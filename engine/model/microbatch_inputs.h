// The arrays of a microbatch on the model's device. On the CPU they are used where the caller has them; on a GPU they are copied
// through page-locked memory, so that the host can prepare the next microbatch at once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "engine/core/op.h"

namespace mbridge {

// Host arrays [micro_batch_size, seq_length], row-major. Labels and mask are null where only logits are wanted.
struct HostMicrobatch {
  const int32_t* tokens = nullptr;
  const int32_t* labels = nullptr;
  const float* loss_mask = nullptr;
  const int32_t* position_ids = nullptr;
};

// The same arrays as tensors [b, s].
struct DeviceMicrobatch {
  Tensor tokens, labels, loss_mask, position_ids;
};

// Not thread-safe.
class MicrobatchInputs {
 public:
  MicrobatchInputs() = default;
  // The words that go with a microbatch.
  using Words = std::array<uint64_t, 4>;

  // Allocates places for `places` microbatches of [b, s]. Throws REASON_OUT_OF_MEMORY.
  MicrobatchInputs(const Context& context, int64_t b, int64_t s, int places = 1);
  // The tensors are valid until the next call with this place (on a GPU: for work enqueued before it), and always at the same
  // addresses.
  DeviceMicrobatch Upload(const HostMicrobatch& host, int place = 0, const Words& words = {});
  // Where the words of a place are on the GPU; null on the CPU.
  const uint64_t* WordsAt(int place) const;

 private:
  // Copies in flight before the host has to wait for the oldest.
  static constexpr int kSlots = 4;
  struct Slot {
    std::shared_ptr<char> host;
    void* copied = nullptr;  // Event.
  };

  size_t bytes() const;  // Of a place.

  Context context_;
  int64_t b_ = 0, s_ = 0;
  std::shared_ptr<void> memory_;
  std::array<Slot, kSlots> slots_;
  int64_t uploads_ = 0;
};

}  // namespace mbridge
