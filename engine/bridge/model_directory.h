// A directory that holds a Hugging Face model: config.json, one or several safetensors files, tokenizer. Immutable after Open;
// reading is thread-safe.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/config_keys.h"
#include "engine/bridge/safetensors.h"

namespace mbridge {

inline constexpr const char* kIndexName = "model.safetensors.index.json";

// Directories that may be read; empty: all. Symbolic links count as where they lead.
using AllowedRoots = std::vector<std::string>;

// The file behind links must lie beneath one of the roots: PERMISSION_DENIED (PATH_OUTSIDE_ROOTS).
absl::Status CheckRoots(const std::string& path, const AllowedRoots& roots);

// A directory as it is, or "org/name" of the local hub cache (HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub): the
// snapshot of its main branch, else its only one. NOT_FOUND (INVALID_REQUEST) tells the command that downloads it.
absl::StatusOr<std::string> FindModelDirectory(const std::string& directory_or_name);

class ModelDirectory {
 public:
  // Opens every file and checks every header. Accepted, with a note: a stale index whose tensors are all there, extra files.
  // NOT_FOUND, INVALID_ARGUMENT or DATA_LOSS say what is wrong and what to do: no config.json, only pickle files
  // (pytorch_model.bin is code, not only data), only an adapter, missing shards, a tensor in two files, a link that leads out
  // of `roots` (PATH_OUTSIDE_ROOTS).
  static absl::StatusOr<ModelDirectory> Open(const std::string& path, const AllowedRoots& roots);

  // config.json alone, of a directory that may be without weights. Errors as of Open.
  static absl::StatusOr<Json> ReadConfigOf(const std::string& path, const AllowedRoots& roots);

  const std::string& path() const { return path_; }
  const Json& config() const { return config_; }
  const std::string& config_text() const { return config_text_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }

  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };
  // Null pointers when there is no such tensor.
  Place Find(const std::string& name) const;
  int64_t tensor_count() const { return static_cast<int64_t>(index_.size()); }
  int64_t bytes() const { return bytes_; }  // Of all tensors.

  // Names of files that belong to the model and are kept as they are: generation_config.json, tokenizer.
  const std::vector<std::string>& side_files() const { return side_files_; }
  // What a person should know.
  const std::vector<std::string>& notes() const { return notes_; }
  // Changes when a file of the model changes.
  std::string Fingerprint() const;

 private:
  ModelDirectory() = default;
  absl::Status ReadConfig(const AllowedRoots& roots);
  absl::StatusOr<std::vector<std::string>> ChooseFiles(const std::vector<std::string>& present);
  absl::Status OpenFiles(const std::vector<std::string>& names, const AllowedRoots& roots);
  void NoteTypes();

  std::string path_, config_text_;
  Json config_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::pair<size_t, size_t>> index_;  // File, entry.
  std::map<std::string, std::string> expected_;             // Of the index: shard of each tensor.
  std::vector<std::string> side_files_, notes_;
  int64_t bytes_ = 0;
};

}  // namespace mbridge
