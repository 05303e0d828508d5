// The steps behind BuildGptDatasets: settings checked, corpora opened once, one dataset a split.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/blend.h"
#include "engine/data/blended_dataset.h"
#include "engine/data/gpt_data.h"
#include "engine/data/gpt_dataset.h"
#include "engine/data/indexed_dataset.h"
#include "engine/data/split.h"

namespace mbridge {

class GptDataBuilder {
 public:
  explicit GptDataBuilder(const GptDataConfig& config) : config_(config) {}

  // Checks the settings and opens every corpus. Call once, first.
  absl::Status Open();
  // Null where the split is absent.
  absl::StatusOr<std::unique_ptr<Dataset>> Build(Split split);

  // Opened files by prefix; empty for mock data.
  const std::map<std::string, std::shared_ptr<const IndexedDataset>>& corpora() const { return corpora_; }

 private:
  absl::Status CheckSettings() const;
  absl::Status ReadLists();
  int64_t SamplesOf(Split split) const;
  std::string KeyOf(Split split) const;
  SequenceRange SequencesOf(Split split, const TokenSource& source) const;
  GptIndexOptions IndexOptions(Split split, const TokenSource& source, int64_t samples) const;
  SampleOptions SampleSettings() const;
  std::shared_ptr<const TokenSource> SourceOf(const std::string& prefix) const;
  absl::StatusOr<std::unique_ptr<GptDataset>> BuildPart(Split split, const std::string& prefix, int64_t samples);
  absl::StatusOr<std::unique_ptr<Dataset>> BuildBlend(Split split, const BlendList& list);
  absl::Status CheckPartSizes(Split split, const BlendList& list, const std::vector<std::unique_ptr<GptDataset>>& parts,
                              const BlendIndex& index) const;
  absl::Status CheckSize(Split split, const Dataset& dataset) const;
  nlohmann::ordered_json Describe(Split split, const std::string& prefix, int64_t samples) const;
  std::string Fingerprint(Split split, const std::vector<std::string>& prefixes) const;

  GptDataConfig config_;
  SplitMatrix matrix_;  // All present without fractions for per-split lists.
  BlendList lists_[3];  // Per split; the same for data_path.
  bool per_split_ = false;
  std::shared_ptr<const TokenSource> mock_;
  std::map<std::string, std::shared_ptr<const IndexedDataset>> corpora_;
};

}  // namespace mbridge
