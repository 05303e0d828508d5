// Several corpora in one order: BlendedDataset of blended_dataset.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/data/blend.h"
#include "engine/data/dataset.h"
#include "engine/data/gpt_dataset.h"

namespace mbridge {

class BlendedDataset : public Dataset {
 public:
  // Every index must lie inside its part.
  BlendedDataset(std::vector<std::unique_ptr<GptDataset>> parts, std::vector<double> weights, BlendIndex index)
      : parts_(std::move(parts)), weights_(std::move(weights)), index_(std::move(index)) {}

  int64_t size() const override { return static_cast<int64_t>(index_.dataset.size()); }
  int64_t sequence_length() const override { return parts_[0]->sequence_length(); }
  void Get(int64_t index, const SampleView& sample) const override;

  const std::vector<std::unique_ptr<GptDataset>>& parts() const { return parts_; }
  // As the index builder used them: normalized, or the parts' sizes where the blend holds all samples.
  const std::vector<double>& weights() const { return weights_; }
  const BlendIndex& index() const { return index_; }

 private:
  std::vector<std::unique_ptr<GptDataset>> parts_;
  std::vector<double> weights_;
  BlendIndex index_;
};

}  // namespace mbridge
