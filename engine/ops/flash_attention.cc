#include "engine/ops/flash_attention.h"

namespace mbridge {

std::string (*g_flash_attention_backend)() = nullptr;

Op<void(const Context&, const FlashAttentionOptions&, DType)> PrepareFlashAttention{nullptr};
Op<void(const Context&, const Tensor&, const FlashAttentionOptions&, const Tensor&, const Tensor&, const Tensor&)>
    FlashAttentionForward{nullptr};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const FlashAttentionOptions&, const Tensor&,
        const Tensor&)>
    FlashAttentionBackward{nullptr};

std::string FlashAttentionRefusal(const FlashAttentionOptions& o, DType dtype) {
  if (g_flash_attention_backend == nullptr) return "this program was built without CUDA";
  if (std::string reason = g_flash_attention_backend(); !reason.empty()) return reason;
  if (dtype != DType::kBF16 && dtype != DType::kF16) {
    return fmt::format("flash attention takes BF16 or F16, not {}", NameOf(dtype));
  }
  if (o.head_size % 8 != 0 || o.head_size <= 0 || o.head_size > 256) {
    return fmt::format("flash attention takes head sizes that are multiples of 8 up to 256, not {}", o.head_size);
  }
  if (o.seq_length < 2) return fmt::format("flash attention takes sequences of 2 tokens or more, not {}", o.seq_length);
  if (o.groups < 1 || o.heads % o.groups != 0) {
    return fmt::format("{} heads are no multiple of {} query groups", o.heads, o.groups);
  }
  return "";
}

// Of the backward, as cuDNN 9 divides it: row sums of dO O, F32 sums of dQ, and with grouped queries dK and dV of every head; the
// last only as an upper bound, since its second engine takes twice as much.
int64_t FlashAttentionWorkspaceBytes(const FlashAttentionOptions& o) {
  constexpr int64_t kNarrow = 2, kWide = 4, kSlack = int64_t{1} << 20;
  const int64_t padded = (o.seq_length + 127) / 128 * 128, rows = o.batch * o.heads * padded;
  int64_t bytes = kSlack + rows * kWide;
  bytes += o.deterministic ? rows * padded * kNarrow : rows * o.head_size * kWide;
  if (o.heads != o.groups) bytes += 2 * rows * o.head_size * kNarrow;
  return bytes;
}

}  // namespace mbridge
