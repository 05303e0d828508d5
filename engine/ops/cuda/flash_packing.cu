#include "engine/ops/cuda/flash_packing.h"

#include "engine/ops/cuda/launch.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge::cuda {
namespace {

struct Sizes {
  int batch, sequences, groups;  // groups: parts of a sequence, 1 where heads are not grouped.
  int row, group, context_row, context_group, heads, heads_per_part;
};

// A thread a part; parts of a sequence are neighbours, then come the sequences of a sample. Its last token's end closes the
// arrays.
__global__ void PackingKernel(const int32_t* cu_seqlens, const Sizes z, int parts, int32_t* lengths, int32_t* qkv,
                              int32_t* context, int32_t* stats) {
  const int part = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (part > parts) return;
  const int last = part == parts ? parts - 1 : part;
  const int group = last % z.groups, sequence = last / z.groups % z.sequences, sample = last / z.groups / z.sequences;
  const int32_t* bounds = cu_seqlens + sample * (z.sequences + 1) + sequence;
  const int first = part == parts ? bounds[1] : bounds[0];
  const int token = first * z.batch + sample;
  lengths[part] = bounds[1] - bounds[0];
  qkv[part] = token * z.row + group * z.group;
  context[part] = token * z.context_row + group * z.context_group;
  stats[part] = token * z.heads + group * z.heads_per_part;
}

}  // namespace

void FillFlashPacking(const Context& context, const FlashAttentionOptions& o, void* memory) {
  if (o.cu_seqlens.dtype != DType::kI32 || o.cu_seqlens.empty() || o.cu_seqlens.size() != o.batch * (o.sequences + 1)) {
    ThrowEngineError("flash attention: cu_seqlens is {}{}, I32 of {} x {} expected", NameOf(o.cu_seqlens.dtype),
                     o.cu_seqlens.shape.ToString(), o.batch, o.sequences + 1);
  }
  const QkvLayout layout{o.heads, o.groups, o.head_size, o.value_width()};
  const int parts = static_cast<int>(FlashPackedParts(o));
  const bool grouped = o.heads != o.groups;
  const int per_part = static_cast<int>(grouped ? layout.heads_per_group() : o.heads);
  const Sizes sizes{static_cast<int>(o.batch),
                    static_cast<int>(o.sequences),
                    static_cast<int>(grouped ? o.groups : 1),
                    static_cast<int>(layout.width()),
                    static_cast<int>(layout.group_width()),
                    static_cast<int>(o.heads * o.value_width()),
                    static_cast<int>(per_part * o.value_width()),
                    static_cast<int>(o.heads),
                    per_part};
  const FlashPacking at(o);
  const auto array = [memory](int64_t bytes) { return reinterpret_cast<int32_t*>(static_cast<char*>(memory) + bytes); };
  PackingKernel<<<(parts + 256) / 256, 256, 0, StreamOf(context)>>>(o.cu_seqlens.as<int32_t>(), sizes, parts, array(at.lengths()),
                                                                    array(at.qkv()), array(at.context()), array(at.stats()));
  MB_CUDA_LAUNCHED();
}

}  // namespace mbridge::cuda
