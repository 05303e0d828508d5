#include "engine/ops/flash_attention.h"

#include "engine/ops/qkv_layout.h"

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
  for (const int64_t size : {o.head_size, o.value_width()}) {
    if (size % 8 == 0 && size > 0 && size <= 256) continue;
    return fmt::format("flash attention takes head sizes that are multiples of 8 up to 256, not {}", size);
  }
  if (o.seq_length < 2) return fmt::format("flash attention takes sequences of 2 tokens or more, not {}", o.seq_length);
  if (o.groups < 1 || o.heads % o.groups != 0) {
    return fmt::format("{} heads are no multiple of {} query groups", o.heads, o.groups);
  }
  if (o.dropout < 0 || o.dropout >= 1)
    return fmt::format("flash attention's dropout is at least 0 and below 1, not {}", o.dropout);
  if (o.sequences <= 0) return "";
  // Elsewhere cuDNN's sums of dQ would not be packed and take sequences times the memory.
  if (o.head_size % 16 != 0 || o.value_width() % 16 != 0) {
    return fmt::format("flash attention of packed sequences takes head sizes that are multiples of 16, not {} and {}",
                       o.head_size, o.value_width());
  }
  if (o.deterministic) return "deterministic flash attention of packed sequences";
  const int64_t elements = o.seq_length * o.batch * QkvLayout{o.heads, o.groups, o.head_size, o.value_width()}.width();
  if (elements * (o.heads / o.groups) > INT32_MAX) {
    return fmt::format("flash attention of packed sequences in {} elements of queries, keys and values is too large", elements);
  }
  return "";
}

// Of the backward, as cuDNN 9 divides it: row sums of dO O, F32 sums of dQ, and with grouped queries dK and dV of every head; the
// last only as an upper bound, since its second engine takes twice as much. Of packed sequences these lie as the gradients do.
int64_t FlashAttentionWorkspaceBytes(const FlashAttentionOptions& o) {
  constexpr int64_t kNarrow = 2, kWide = 4, kSlack = int64_t{1} << 20;
  if (o.sequences > 0) {
    const int64_t tokens = o.seq_length * o.batch, row = QkvLayout{o.heads, o.groups, o.head_size, o.value_width()}.width();
    int64_t bytes = kSlack + FlashPackingBytes(o) + tokens * (o.heads + row) * kWide;
    if (o.heads != o.groups) bytes += 2 * tokens * row * (o.heads / o.groups) * kWide;
    return bytes;
  }
  const int64_t padded = (o.seq_length + 127) / 128 * 128, rows = o.batch * o.heads * padded;
  int64_t bytes = kSlack + rows * kWide;
  bytes += o.deterministic ? rows * padded * kNarrow : rows * o.head_size * kWide;
  if (o.heads != o.groups) bytes += rows * (o.head_size + o.value_width()) * kNarrow;
  return bytes;
}

int64_t FlashPackedParts(const FlashAttentionOptions& o) { return o.batch * o.sequences * (o.heads == o.groups ? 1 : o.groups); }

int64_t FlashPackingBytes(const FlashAttentionOptions& o) {
  if (o.sequences <= 0) return 0;
  return ((FlashPackedParts(o) + 1) * 4 * static_cast<int64_t>(sizeof(int32_t)) + 255) / 256 * 256;
}

}  // namespace mbridge
