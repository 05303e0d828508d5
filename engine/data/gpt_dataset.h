// Samples of one corpus split: GPTDataset of gpt_dataset.py.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/data/dataset.h"
#include "engine/data/gpt_index.h"

namespace mbridge {

struct SampleOptions {
  int64_t vocab_size = 0;  // Ids outside [0, vocab_size) throw; 0 checks nothing.
  int32_t eod_id = -1;
  int32_t pad_id = -1;  // -1: a pad that no token equals.
  bool eod_mask_loss = false;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool inter_document_masking = false;
  bool first_sample_loss_mask = false;
};

class GptDataset : public Dataset {
 public:
  GptDataset(std::shared_ptr<const TokenSource> source, GptIndexOptions index_options, GptIndexPlan plan, GptIndex index,
             SampleOptions sample_options);

  int64_t size() const override { return static_cast<int64_t>(index_.shuffle.values.size()); }
  int64_t sequence_length() const override { return index_options_.sequence_length; }
  void Get(int64_t index, const SampleView& sample) const override;

  const TokenSource& source() const { return *source_; }
  const GptIndexOptions& index_options() const { return index_options_; }
  const GptIndexPlan& plan() const { return plan_; }
  const GptIndex& index() const { return index_; }

 private:
  // Fills tokens (short texts with the pad) and labels; with inter_document_masking also positions and segments.
  void ReadText(int64_t index, const SampleView& sample) const;
  void CheckIds(int64_t index, const int32_t* tokens, int64_t count) const;
  void FillLossMask(const SampleView& sample) const;
  void FillPositions(const SampleView& sample) const;
  void FillSegments(const SampleView& sample) const;

  std::shared_ptr<const TokenSource> source_;
  GptIndexOptions index_options_;
  GptIndexPlan plan_;
  GptIndex index_;
  SampleOptions options_;
  // first_sample_loss_mask: the mask that later samples start from.
  mutable std::once_flag template_once_;
  mutable std::vector<float> template_;
};

}  // namespace mbridge
