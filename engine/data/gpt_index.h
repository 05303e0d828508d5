// The three index arrays of a GPT dataset (gpt_dataset.py, build_sample_idx in helpers.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/split.h"
#include "engine/data/token_source.h"

namespace mbridge {

struct GptIndexOptions {
  SequenceRange sequences;      // The split's part of the corpus.
  int64_t sequence_length = 0;  // s
  int64_t samples = 0;          // Requested; kOneEpoch for one epoch.
  int64_t seed = 1234;
  bool extra_token = true;        // A sample covers s + 1 tokens instead of s.
  bool drop_last_partial = true;  // False: a short last sample is kept (validation only).
};

// Sizes that follow from the options and the token count alone.
struct GptIndexPlan {
  int64_t tokens_per_epoch = 0;
  int64_t epochs = 0;
  int64_t samples = 0;                // In all epochs.
  int64_t samples_per_epoch = 0;      // Whole ones.
  int64_t samples_before_final = 0;   // In all epochs but the last.
  bool separate_final_epoch = false;  // The last epoch, only partly needed, is shuffled by itself.
};
// INVALID_ARGUMENT where the split has no tokens (`what` names it), or the arrays pass NumPy's 32-bit types.
absl::StatusOr<GptIndexPlan> PlanGptIndex(const std::string& what, int64_t tokens_per_epoch, const GptIndexOptions& options);

// An array in memory or in a mapped file that `owner` keeps alive.
template <class T> struct SharedArray {
  std::shared_ptr<const void> owner;
  std::span<const T> values;

  static SharedArray Own(std::vector<T> vector) {
    auto owned = std::make_shared<const std::vector<T>>(std::move(vector));
    return {owned, std::span<const T>(*owned)};
  }
};

struct GptIndex {
  SharedArray<int32_t> document;  // [epochs * sequences]: the order in which sequences are walked.
  SharedArray<int32_t> sample;    // [samples + 1, 2]: position in `document` and token offset where a sample starts.
  SharedArray<uint32_t> shuffle;  // [samples]: sample number of each index.
};

// Draws documents, then samples, from one RandomState(seed).
GptIndex BuildGptIndex(const TokenSource& source, const GptIndexOptions& options, const GptIndexPlan& plan);

// The sample array for a walk of `documents`; at most plan.samples samples.
std::vector<int32_t> BuildSampleIndex(const TokenSource& source, std::span<const int32_t> documents, int64_t sequence_length,
                                      int64_t samples, bool extra_token);

// True where every number lies where BuildGptIndex could have put it, so that no sample can leave the corpus.
bool IsConsistent(const GptIndex& index, const TokenSource& source, const GptIndexOptions& options, const GptIndexPlan& plan);

}  // namespace mbridge
