// Tensor and sequence parallelism inside a model: what a rank of the tensor-parallel group holds and exchanges
// (megatron/core/tensor_parallel/{mappings,layers}.py).
//
// Each rank has 1/size of the heads, MLP columns and vocabulary. Activations between the blocks (the residual stream) are whole
// on every rank, or with sequence parallelism cut along the sequence: rank r has rows [r, r + 1) * s / size.
#pragma once

#include "engine/comm/communicator.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

struct Step;

struct TensorParallel {
  Communicator* group = nullptr;  // Null: one rank.
  bool sequence_parallel = false;
  Tensor whole_sequence;  // Scratch [s, b, h], with sequence parallelism; holds one thing at a time.

  int size() const { return group == nullptr ? 1 : group->size(); }
  int rank() const { return group == nullptr ? 0 : group->rank(); }
  // Rows of the residual stream that a rank holds, of `seq_length`.
  int64_t StreamLength(int64_t seq_length) const { return sequence_parallel ? seq_length / size() : seq_length; }
};

// The configuration of one rank's share: heads, groups, MLP width and vocabulary divided by `size`; everything else as it is.
// Throws EngineError REASON_INVALID_CONFIG naming the field that `size` does not divide, REASON_UNSUPPORTED_MODEL for parts that
// are not built for several ranks.
GptConfig ShareOf(const GptConfig& config, int size);

// The whole sequence of a stream [stream length, b, n], n at most the hidden size: itself without sequence parallelism, else
// gathered into the scratch.
Tensor GatherSequence(const Step& step, const Tensor& stream);

// The same into `whole` [s, b, n], which stays as it is through other exchanges. Without sequence parallelism `stream` itself.
Tensor GatherSequenceInto(const Step& step, const Tensor& stream, const Tensor& whole);

// tensor = the sum over the ranks, on every rank. One rank: nothing to do.
void SumOverRanks(const Step& step, const Tensor& tensor);

// Where a product that is summed over the ranks goes before: the scratch with sequence parallelism, else `stream` itself.
Tensor PartialSum(const Step& step, const Tensor& stream);

// stream = the sum over the ranks of their rounded `partial` (from PartialSum): whole, or this rank's rows with sequence
// parallelism. One rank: nothing to do.
void SumPartial(const Step& step, const Tensor& partial, const Tensor& stream);

}  // namespace mbridge
