// Index cache files under Megatron-LM's names: <md5>-<class>-<split>-<array>.npy and …-description.txt, the MD5 being that
// of the description (blended_megatron_dataset_builder.py, gpt_dataset.py, blended_dataset.py).
//
// Megatron-LM's key leaves out what the data files hold and some settings, so it reuses a cache after the data changed. We
// write one more file, …-mbridge.txt, last: data sizes, times, settings, and a checksum of each array. A cache without it, or
// with another, is rebuilt.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>
#include "absl/status/status.h"

#include "engine/data/blend.h"
#include "engine/data/gpt_index.h"

namespace mbridge {

// json.dumps(value, indent=4) of Python: key order kept, floats as repr().
std::string PythonJson(const nlohmann::ordered_json& value);

struct IndexCacheKey {
  IndexCacheKey(std::string folder, std::string class_name, Split split, std::string description, std::string fingerprint);
  // <folder>/<md5>-<class>-<split>-<suffix>
  std::string Path(const std::string& suffix) const;

  std::string folder, class_name;
  Split split;
  std::string description;  // Hashed; stored as …-description.txt.
  std::string fingerprint;  // First part of …-mbridge.txt.
  std::string md5;          // 32 hexadecimal digits.
};

// Mapped arrays, fully checked, or nullopt where anything differs.
std::optional<GptIndex> LoadGptIndex(const IndexCacheKey& key, const TokenSource& source, const GptIndexOptions& options,
                                     const GptIndexPlan& plan);
// Makes the folder if needed. Safe against a concurrent writer of the same cache: each file appears whole.
absl::Status SaveGptIndex(const IndexCacheKey& key, const GptIndex& index);

// `part_sizes` bound the sample numbers.
std::optional<BlendIndex> LoadBlendIndex(const IndexCacheKey& key, int64_t size, const std::vector<int64_t>& part_sizes);
absl::Status SaveBlendIndex(const IndexCacheKey& key, const BlendIndex& index);

}  // namespace mbridge
