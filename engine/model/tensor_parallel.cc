#include "engine/model/tensor_parallel.h"

#include <fmt/format.h>

#include <string_view>

#include "engine/core/error.h"
#include "engine/model/step.h"
#include "engine/ops/convert.h"

namespace mbridge {
namespace {

int64_t Divided(std::string_view field, int64_t value, int size) {
  if (value % size == 0) return value / size;
  throw EngineError(v1::REASON_INVALID_CONFIG,
                    fmt::format("model.tensor_model_parallel_size is {}: it must divide {}, which is {}", size, field, value));
}

// The first elements of the scratch as a tensor [s, b, n] like `stream`.
Tensor WholeOf(const Step& step, const Tensor& stream) {
  Tensor whole = step.tensor_parallel.whole_sequence;
  Shape shape = stream.shape;
  shape[0] *= step.tensor_parallel.size();
  if (shape.NumElements() > whole.size())
    ThrowEngineError("a gathered sequence {} for {}", shape.ToString(), whole.shape.ToString());
  whole.shape = shape;
  return whole;
}

}  // namespace

GptConfig ShareOf(const GptConfig& config, int size) {
  if (size > 1 && (config.attention_output_gate || CountLayers(config, HasGatedDelta) > 0)) {
    throw EngineError(
        v1::REASON_UNSUPPORTED_MODEL,
        fmt::format("model.tensor_model_parallel_size is {}: 1 with a gated delta net or an output gate of attention", size));
  }
  GptConfig share = config;
  if (CountLayers(config, HasAttention) > 0) {
    share.num_attention_heads = Divided("model.num_attention_heads", config.num_attention_heads, size);
    share.num_query_groups = Divided("model.num_query_groups", config.num_query_groups, size);
  }
  if (CountLayers(config, HasMlp) > 0) share.ffn_hidden_size = Divided("model.ffn_hidden_size", config.ffn_hidden_size, size);
  if (CountLayers(config, HasMamba) > 0) {
    share.mamba_num_heads = Divided("model.mamba_num_heads", config.mamba_num_heads, size);
    share.mamba_num_groups = Divided("model.mamba_num_groups", config.mamba_num_groups, size);
    if (config.mamba_rms_norm && config.mamba_norm_groups > 0)
      share.mamba_norm_groups = Divided("model.mamba_norm_groups", config.mamba_norm_groups, size);
  }
  share.moe_ffn_hidden_size = Divided("model.moe_ffn_hidden_size", config.moe_ffn_hidden_size, size);
  share.moe_shared_expert_intermediate_size =
      Divided("model.moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size, size);
  share.padded_vocab_size = Divided("the padded model.vocab_size", config.padded_vocab_size, size);
  if (config.sequence_parallel) Divided("model.seq_length (with model.sequence_parallel)", config.seq_length, size);
  return share;
}

Tensor GatherSequence(const Step& step, const Tensor& stream) {
  if (!step.tensor_parallel.sequence_parallel) return stream;
  return GatherSequenceInto(step, stream, WholeOf(step, stream));
}

Tensor GatherSequenceInto(const Step& step, const Tensor& stream, const Tensor& whole) {
  if (!step.tensor_parallel.sequence_parallel) return stream;
  step.tensor_parallel.group->AllGather(stream, whole);
  return whole;
}

void SumOverRanks(const Step& step, const Tensor& tensor) {
  if (step.tensor_parallel.size() == 1) return;
  if (tensor.dtype != step.precision && tensor.dtype != DType::kF32) ThrowEngineError("a sum of {}", NameOf(tensor.dtype));
  step.tensor_parallel.group->AllReduce(tensor, ReduceOp::kSum);
}

Tensor PartialSum(const Step& step, const Tensor& stream) {
  return step.tensor_parallel.sequence_parallel ? WholeOf(step, stream) : stream;
}

void SumPartial(const Step& step, const Tensor& partial, const Tensor& stream) {
  const TensorParallel& parallel = step.tensor_parallel;
  if (parallel.size() == 1) return;
  if (partial.dtype != step.precision) Convert(step.context, partial, step.precision, partial);
  if (parallel.sequence_parallel) {
    parallel.group->ReduceScatter(partial, stream);
  } else {
    parallel.group->AllReduce(partial, ReduceOp::kSum);
  }
}

}  // namespace mbridge
