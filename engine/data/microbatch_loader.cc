#include "engine/data/microbatch_loader.h"

#include "engine/core/error.h"

namespace mbridge {

Batch::Batch(int micro_batch_size, int64_t sequence_length, bool with_segments)
    : micro_batch_size(micro_batch_size), sequence_length(sequence_length) {
  const size_t elements = static_cast<size_t>(micro_batch_size) * static_cast<size_t>(sequence_length);
  tokens.resize(elements);
  labels.resize(elements);
  position_ids.resize(elements);
  loss_mask.resize(elements);
  if (with_segments) {
    cu_seqlens.resize(elements + static_cast<size_t>(micro_batch_size));
    num_segments.resize(static_cast<size_t>(micro_batch_size));
  }
}

SampleView Batch::Row(int row) {
  const int64_t begin = row * sequence_length;
  SampleView view{tokens.data() + begin, labels.data() + begin, loss_mask.data() + begin, position_ids.data() + begin};
  if (!num_segments.empty()) {
    view.cu_seqlens = cu_seqlens.data() + row * (sequence_length + 1);
    view.num_segments = num_segments.data() + row;
  }
  return view;
}

MicrobatchLoader::MicrobatchLoader(const Dataset* dataset, int64_t consumed_samples, int micro_batch_size, int dp_rank,
                                   int dp_size)
    : dataset_(dataset), consumed_(consumed_samples), micro_batch_size_(micro_batch_size), dp_rank_(dp_rank), dp_size_(dp_size) {
  if (micro_batch_size <= 0 || dp_size <= 0 || dp_rank < 0 || dp_rank >= dp_size) {
    ThrowEngineError("loader of micro batch size {}, data-parallel rank {} of {}", micro_batch_size, dp_rank, dp_size);
  }
  if (consumed_samples < 0 || consumed_samples > dataset->size()) {
    throw EngineError(v1::REASON_DATA_ERROR,
                      fmt::format("the data hold {} samples, but the run has already used {}; the data or their split "
                                  "changed since the checkpoint",
                                  dataset->size(), consumed_samples));
  }
}

int64_t MicrobatchLoader::remaining() const {
  return (dataset_->size() - consumed_) / (static_cast<int64_t>(micro_batch_size_) * dp_size_);
}

bool MicrobatchLoader::Next(Batch* batch) {
  if (batch->micro_batch_size != micro_batch_size_ || batch->sequence_length != dataset_->sequence_length()) {
    ThrowEngineError("batch of shape [{}, {}] for a loader of [{}, {}]", batch->micro_batch_size, batch->sequence_length,
                     micro_batch_size_, dataset_->sequence_length());
  }
  if (remaining() == 0) return false;
  const int64_t first = consumed_ + static_cast<int64_t>(dp_rank_) * micro_batch_size_;
  for (int row = 0; row < micro_batch_size_; ++row) dataset_->Get(first + row, batch->Row(row));
  consumed_ += static_cast<int64_t>(micro_batch_size_) * dp_size_;
  return true;
}

}  // namespace mbridge
