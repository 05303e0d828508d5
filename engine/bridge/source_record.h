// What an imported checkpoint remembers of its source: the folder `hugging_face` beside the data.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/model_directory.h"

namespace mbridge {

struct SourceRecord {
  struct Entry {
    std::string name;
    std::string dtype;         // The format's word.
    std::string same_as = {};  // Name of the tensor that it repeats (a tied head that was stored).
  };
  Json config;  // As it was.
  std::string config_text;
  std::vector<Entry> tensors;           // In the order of the source; empty: unknown.
  std::vector<std::string> side_files;  // Paths.
};

// Copies config.json and side files of `model` into directory/hugging_face and writes source.json; all synced.
absl::Status WriteSourceRecord(const std::string& directory, const ModelDirectory& model,
                               const std::vector<SourceRecord::Entry>& tensors);

// From a checkpoint's folder or from a model's directory. NOT_FOUND when `directory` is neither.
absl::StatusOr<SourceRecord> ReadSourceRecord(const std::string& directory, const AllowedRoots& roots);

}  // namespace mbridge
