// A sequence of training samples, and one sample's arrays.
#pragma once

#include <cstdint>

namespace mbridge {

// Where a sample is written; each pointer has room for sequence_length elements, none is null but the last two.
struct SampleView {
  int32_t* tokens = nullptr;
  int32_t* labels = nullptr;   // The following token of each position.
  float* loss_mask = nullptr;  // 1 = counts in the loss.
  int32_t* position_ids = nullptr;
  // Optional: attention segments as cumulative lengths, [0, …, sequence_length]; room for sequence_length + 1 elements.
  // One segment unless reset_attention_mask or inter_document_masking is on: query q sees key k <= q of its own segment.
  int32_t* cu_seqlens = nullptr;
  int32_t* num_segments = nullptr;  // Number of segments; set together with cu_seqlens.
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;
  virtual int64_t sequence_length() const = 0;
  // Writes sample `index` in [0, size()). Allocates nothing. Thread-safe. Throws EngineError(REASON_DATA_ERROR) where the
  // data hold a token id outside the vocabulary, REASON_ENGINE_ERROR for an index out of range.
  virtual void Get(int64_t index, const SampleView& sample) const = 0;
};

}  // namespace mbridge
