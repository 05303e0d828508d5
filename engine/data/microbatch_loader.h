// The sequential sampler: sample numbers in order, a slice per data-parallel rank, resumable from a sample count.
// Source: megatron/training/datasets/data_samplers.py (dataloader_type "single").
#pragma once

#include <cstdint>
#include <vector>

#include "engine/data/dataset.h"

namespace mbridge {

// One microbatch of one rank on the host, row-major [micro_batch_size, sequence_length].
struct Batch {
  Batch() = default;
  // with_segments: also cu_seqlens [b, s + 1] (row i holds num_segments[i] + 1 values).
  Batch(int micro_batch_size, int64_t sequence_length, bool with_segments = false);

  SampleView Row(int row);

  int micro_batch_size = 0;
  int64_t sequence_length = 0;
  std::vector<int32_t> tokens, labels, position_ids;
  std::vector<float> loss_mask;
  std::vector<int32_t> cu_seqlens, num_segments;  // Empty without segments.
};

// Microbatch m of rank d holds samples consumed + m * b * dp + d * b … + b - 1, in row order; an incomplete last group of
// b * dp samples is dropped. Validation uses a loader of its own that simply goes on at the next evaluation.
// Not thread-safe; the dataset must outlive it.
class MicrobatchLoader {
 public:
  // consumed_samples: samples already used by all ranks together (consumed_train_samples, consumed_valid_samples).
  // Throws EngineError(REASON_DATA_ERROR) where consumed_samples lies outside the dataset.
  MicrobatchLoader(const Dataset* dataset, int64_t consumed_samples, int micro_batch_size, int dp_rank, int dp_size);

  // Fills *batch, whose shape must fit; allocates nothing. False, batch untouched: fewer than b * dp samples are left.
  bool Next(Batch* batch);
  // Samples used by all ranks together, including the initial count.
  int64_t consumed() const { return consumed_; }
  // Whole microbatches (of every rank) that are left.
  int64_t remaining() const;

 private:
  const Dataset* dataset_;
  int64_t consumed_;
  int micro_batch_size_, dp_rank_, dp_size_;
};

}  // namespace mbridge
